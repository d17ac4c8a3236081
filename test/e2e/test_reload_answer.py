"""What is answered to POST /ssd/reload_drafter and GET /ssd/status, no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_ssd.drafter.process import DrafterSettings
from sglang_ssd.target import hooks, http_routes
from sglang_ssd.target.http_routes import RELOAD_PREFIX
from sglang_ssd.target.stats import ClientStats
from sglang_ssd.target.supervisor import DrafterSupervisor, RestartPace
from sglang_ssd.wire.messages import DrafterStatus


def answer_to(rid: str | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    hooks.reload_if_asked(None, SimpleNamespace(rid=rid))
    hooks.add_ssd_state(None, None, state)
    reload: dict[str, Any] = state["ssd"]["reload"]
    return reload


def client_of(status: DrafterStatus | None) -> Any:
    """As much of a DraftClient as its state is made of."""
    return SimpleNamespace(
        stats=ClientStats(),
        link=SimpleNamespace(welcome=None, lives=1, last_error=""),
        state="ready",
        num_live=0,
        num_restarts=0,
        deadline_s=0.5,
        transport_stats=None,
        drafter_status=status,
        look=lambda: None,
        request_status=lambda: None,
    )


def test_each_asker_is_told_of_his_own_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a refusal is lost, or is told to one whose model is still loading."""
    pace = RestartPace(delay_s=1.0, delay_max_s=1.0, healthy_s=1.0, start_timeout_s=1.0)
    drafter = DrafterSupervisor(lambda _: None, DrafterSettings(model_path="hub/first"), pace)
    drafter.ask_reload(DrafterSettings(model_path="hub/second"))
    monkeypatch.setattr(hooks, "_drafter", drafter)
    monkeypatch.setattr(hooks, "_client", client_of(None))
    mine = answer_to(RELOAD_PREFIX + '{"model_path": "/no/such/model"}')
    assert (mine["state"], mine["number"]) == ("failed", 2)
    assert "/no/such/model is missing" in mine["error"]
    assert answer_to(None)["state"] == "loading"


def test_what_the_drafter_refused_is_told() -> None:
    """Red when a stranger that knocks at the drafter is seen in its own log alone."""
    status = DrafterStatus(*[0] * 14, refused={"key": 3})
    assert hooks.drafter_state(client_of(status), None)["drafter_refused"] == {"key": 3}
    assert hooks.drafter_state(client_of(None), None)["drafter_refused"] is None


class Manager:
    """A tokenizer manager whose scheduler is in those states, one after the other."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self._states = list(states)

    def auto_create_handle_loop(self) -> None: ...

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return [SimpleNamespace(internal_state=state)]


def http_client(*states: dict[str, Any], **keys: str | None) -> TestClient:
    app = FastAPI()
    add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None, **keys})
    http_routes._add_to(app, Manager(*states))  # type: ignore[arg-type]
    return TestClient(app)


def reload_state(state: str, number: int) -> dict[str, Any]:
    return {"ssd": {"state": "ready", "reload": {"state": state, "number": number}}}


LOADING = reload_state("loading", 1)
REFUSED: dict[str, tuple[tuple[dict[str, Any], ...], float, int, str]] = {
    "off": (({},), 15.0, 400, "this server has no drafter"),
    "overtaken": (
        (LOADING, reload_state("loading", 2)),
        15.0,
        409,
        "another reload took its place; /ssd/status tells how that goes on",
    ),
    "late": (
        (LOADING,),
        -1e9,
        504,
        "the drafter is still loading; /ssd/status tells how it goes on",
    ),
}


@pytest.mark.parametrize(("states", "exchange_s", "code", "says"), REFUSED.values(), ids=REFUSED)
def test_a_reload_that_comes_to_nothing(
    states: tuple[dict[str, Any], ...],
    exchange_s: float,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when an asker hears nothing, or of the reload of another."""
    monkeypatch.setattr(http_routes, "_EXCHANGE_S", exchange_s)
    answer = http_client(*states).post("/ssd/reload_drafter")
    assert (answer.status_code, answer.json()) == (code, {"error": {"message": says}})


@pytest.mark.parametrize(
    ("keys", "opens"),
    [
        ({}, [None, "client", "admin", "other"]),
        ({"api_key": "client"}, ["client"]),
        ({"admin_api_key": "admin"}, ["admin"]),
        ({"api_key": "client", "admin_api_key": "admin"}, ["admin"]),
    ],
)
def test_the_key_of_a_reload(keys: dict[str, str], opens: list[str | None]) -> None:
    """Red when anybody may exchange the drafter of a server with keys, or its owner may not."""
    client = http_client(reload_state("done", 1), **keys)
    for key in (None, "client", "admin", "other"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = client.post("/ssd/reload_drafter", headers=headers)
        assert (answer.status_code == 200) == (key in opens), key
