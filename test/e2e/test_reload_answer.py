"""What is answered to POST /ssd/reload_drafter and GET /ssd/status, no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_ssd.drafter.process import DrafterSettings
from sglang_ssd.target import hooks, http_routes
from sglang_ssd.target.http_routes import RELOAD_PREFIX
from sglang_ssd.target.stats import ClientStats
from sglang_ssd.target.supervisor import DrafterSupervisor, RestartPace
from sglang_ssd.wire.messages import DrafterStatus


def ssd_state(dp_rank: int | None = None) -> dict[str, Any]:
    """What the scheduler of that replica shows; SGLang's rank is None without others."""
    state: dict[str, Any] = {}
    with get_parallel().override(dp_rank=dp_rank):
        hooks.add_ssd_state(None, None, state)
    shown: dict[str, Any] = state["ssd"]
    return shown


def answer_to(rid: str | None) -> dict[str, Any]:
    hooks.reload_if_asked(None, SimpleNamespace(rid=rid))
    reload: dict[str, Any] = ssd_state()["reload"]
    return reload


@pytest.fixture(autouse=True)
def of_a_server_with_ssd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "is_ssd", lambda: True)


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


Answers = list[dict[str, Any]]
"""Of the replicas to one question, in whatever order."""


class Manager:
    """A tokenizer manager whose schedulers give those answers, one after the other."""

    def __init__(self, *answers: Answers) -> None:
        self._answers = list(answers)

    def auto_create_handle_loop(self) -> None: ...

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        states = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [SimpleNamespace(internal_state={"ssd": state}) for state in states]


def http_client(*answers: Answers, **keys: str | None) -> TestClient:
    app = FastAPI()
    add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None, **keys})
    http_routes._add_to(app, Manager(*answers))  # type: ignore[arg-type]
    return TestClient(app)


def replica(state: str, number: int = 1, *, dp_rank: int = 0, error: str = "") -> dict[str, Any]:
    """One whose reload is in that state."""
    reload = {"state": state, "number": number, "error": error}
    return {"dp_rank": dp_rank, "state": "ready", "reload": reload}


def test_replicas_are_shown_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when nobody can tell whose state is whose, with a drafter or without."""
    monkeypatch.setattr(hooks, "_client", client_of(None))
    assert ssd_state()["dp_rank"] == 0
    answers = [ssd_state(dp_rank) for dp_rank in (2, 0, 1)]
    shown = http_client(answers).get("/ssd/status").json()["replicas"]
    assert [state["dp_rank"] for state in shown] == [0, 1, 2]
    monkeypatch.setattr(hooks, "_client", None)
    no_reload = {"state": "failed", "error": "this server has no drafter"}
    assert ssd_state(1) == {"dp_rank": 1, "state": "off", "reload": no_reload}


LOADING = replica("loading")
GONE = "draft model: /gone is missing"
OFF = {"dp_rank": 0, **hooks.NO_DRAFTER}
FAILED: dict[str, tuple[tuple[Answers, ...], int, str]] = {
    "off": (([OFF],), 400, "this server has no drafter"),
    "overtaken": (
        ([LOADING], [replica("loading", 2)]),
        409,
        "another reload took its place; /ssd/status tells how that goes on",
    ),
    "everywhere": (
        ([replica("failed", dp_rank=rank, error=GONE) for rank in (1, 0)],),
        400,
        f"dp_rank 0, 1: {GONE}",
    ),
    "in one replica, before the other serves": (
        (
            [replica("loading", dp_rank=1), LOADING],
            [LOADING, replica("failed", dp_rank=1, error="killed")],
            [replica("failed", dp_rank=1, error="killed"), replica("done")],
        ),
        400,
        "dp_rank 1: killed; dp_rank 0: serves the new model",
    ),
    "refused by one replica, whose state tells of the reload before": (
        (
            [LOADING, replica("failed", 2, dp_rank=1, error=GONE)],
            [replica("done"), replica("done", 1, dp_rank=1)],
        ),
        400,
        f"dp_rank 1: {GONE}; dp_rank 0: serves the new model",
    ),
}


@pytest.mark.parametrize(("answers", "code", "says"), FAILED.values(), ids=FAILED)
def test_a_reload_that_fails(
    answers: tuple[Answers, ...], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an asker hears nothing, of the reload of another, or before every replica is done,
    or cannot tell which replicas are."""
    monkeypatch.setattr(http_routes, "_POLL_S", 0.0)
    answer = http_client(*answers).post("/ssd/reload_drafter")
    assert (answer.status_code, answer.json()) == (code, {"error": {"message": says}})


LATE: dict[str, tuple[Answers, int, str]] = {
    "all": ([LOADING], 504, "the drafter is still loading; /ssd/status tells how it goes on"),
    "one, and another failed": (
        [LOADING, replica("failed", dp_rank=1, error=GONE)],
        400,
        f"dp_rank 1: {GONE}; dp_rank 0: is still loading it",
    ),
}


@pytest.mark.parametrize(("answer", "code", "says"), LATE.values(), ids=LATE)
def test_a_reload_that_takes_too_long(
    answer: Answers, code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an asker waits for ever, or a failure is hidden behind what is late."""
    monkeypatch.setattr(http_routes, "_EXCHANGE_S", -1e9)
    told = http_client(answer).post("/ssd/reload_drafter")
    assert (told.status_code, told.json()) == (code, {"error": {"message": says}})


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
    client = http_client([replica("done")], **keys)
    for key in (None, "client", "admin", "other"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = client.post("/ssd/reload_drafter", headers=headers)
        assert (answer.status_code == 200) == (key in opens), key
