"""What the scheduler answers to POST /ssd/reload_drafter and GET /ssd/status, no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ssd.drafter.process import DrafterSettings
from sglang_ssd.target import hooks
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
