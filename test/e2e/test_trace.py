"""--ssd-trace of a running server: both processes on one clock, from the first prefill on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel

from harness.client import Request, generate
from harness.prompts import load_prompts
from harness.server import ServerPool
from sglang_ssd.config import CONFIG_ENV
from sglang_ssd.target import hooks
from sglang_ssd.trace import Tracer
from timeline import (
    BRANCH_STEP,
    DRAFTER,
    PREFILL,
    PREFILL_SLICE,
    TARGET,
    VERIFY,
    WAIT,
    read_trace,
    select,
)


def test_both_prefill_at_once_and_rounds_follow(
    pool: ServerPool, spec_for: Any, tmp_path: Path
) -> None:
    """Red when the drafter hears of a prompt only behind its last chunk, or a process, a kind of
    span or the common clock is missing in the trace."""
    trace = tmp_path / "trace.json"
    chunked = ("--chunked-prefill-size", "32")
    server = pool.take(spec_for("self", flags=chunked, settings=(("trace", str(trace)),)))
    prompts = load_prompts(server.spec.model, 8)
    long = tuple(token for prompt in prompts for token in prompt.input_ids)
    generate(server.url, Request(long, {"max_new_tokens": 24, "ignore_eos": True}))
    server.stop()
    spans = read_trace(trace)
    chunks = select(spans, TARGET, PREFILL)[-(len(long) // 32) :]
    slices = [
        span for span in select(spans, DRAFTER, PREFILL_SLICE) if span.start >= chunks[0].start
    ]
    assert len(chunks) > 4
    assert slices[0].start < chunks[2].end
    rounds = select(spans, TARGET, VERIFY, since=chunks[-1].end)
    assert len(rounds) >= 24 // (server.spec.num_steps + 1)
    assert select(spans, TARGET, WAIT, since=chunks[-1].end)
    assert select(spans, DRAFTER, BRANCH_STEP, since=chunks[-1].end)


def test_a_replica_that_starts_late_erases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when data-parallel replicas begin one file anew. Needs no server."""
    settings = {"mode": "off", "trace": str(tmp_path / "trace.json")}
    monkeypatch.setenv(CONFIG_ENV, json.dumps(settings))
    monkeypatch.setattr(hooks, "is_ssd", lambda: True)
    for rank in (1, 0):
        with get_parallel().override(tp_rank=0, dp_rank=rank, dp_size=2):
            hooks.start_before_target_loads(SimpleNamespace(metrics_collector=None))  # type: ignore[arg-type]
            tracer = Tracer(hooks.replica_config().trace, TARGET)
        tracer.add(f"of {rank}", 0, 1000)
        tracer.flush()
    written = {path.name: read_trace(path) for path in tmp_path.iterdir()}
    assert {name: [span.name for span in spans] for name, spans in written.items()} == {
        f"trace.dp{rank}.json": [f"of {rank}"] for rank in (0, 1)
    }
