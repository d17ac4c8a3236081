"""Engine.save_remote_model saves the target: the drafter's model is no model of the worker's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_ssd.config import ALGORITHM
from sglang_ssd.target import request_hooks

SAVE = SchedulerWeightUpdaterManager.save_remote_model
SAVE = getattr(SAVE, "__wrapped__", SAVE)


def updater_of(saved: list[str]) -> Any:
    exporter = SimpleNamespace(save_remote_model=saved.append)
    target = SimpleNamespace(model_runner=SimpleNamespace(weight_exporter=exporter))
    return SimpleNamespace(tp_worker=target, draft_worker=object())


def test_the_target_is_saved_without_a_draft_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when SGLang's assertion about draft_url ends the scheduler."""
    spec = SimpleNamespace(speculative_algorithm=ALGORITHM)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    saved: list[str] = []
    updater = updater_of(saved)
    worker = updater.draft_worker
    request_hooks.save_the_target_alone(SAVE, updater, {"url": "redis://store/model"})
    assert saved == ["redis://store/model"]
    assert updater.draft_worker is worker


def test_other_algorithms_save_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runtime_context, "get_spec", lambda: SimpleNamespace(speculative_algorithm="EAGLE")
    )
    with pytest.raises(AssertionError, match="draft_url"):
        request_hooks.save_the_target_alone(SAVE, updater_of([]), {"url": "redis://store/model"})
