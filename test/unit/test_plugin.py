"""What the plugin does in every process before SGLang is looked at."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest

from sglang_ssd import plugin


def test_a_child_whose_parent_has_ended_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = SimpleNamespace(pid=1234, is_alive=lambda: False)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    with pytest.raises(SystemExit) as ended:
        plugin.end_if_orphaned()
    says = "sglang-ssd: the server 1234 ended while this process was starting"
    assert ended.value.code == says


def test_other_processes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.end_if_orphaned()
    alive = SimpleNamespace(pid=1234, is_alive=lambda: True)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: alive)
    plugin.end_if_orphaned()
