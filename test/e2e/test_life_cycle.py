"""Processes and sequences come and go: stopping, idling, two servers on one machine."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import KINDS, DrafterKind
from harness.client import Request, generate_all, stream
from harness.idle import drafter_status
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import Server, ServerPool
from sglang_ssd.platform.affinity import format_cores

DRAFTER_MARK = "[drafter]"
MAX_IDLE_SHARE = 0.1
"""Of one core, all processes of a server together; SGLang's own threads wake up now and then."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_server_holds_nothing_and_sleeps(
    kind: DrafterKind, pool: ServerPool, spec_for: Any, figures: dict[str, Any]
) -> None:
    """Red when an ended request leaves its sequence with the drafter, or an idle loop polls."""
    server = pool.get(spec_for(kind))
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": length})
        for length, prompt in enumerate(load_prompts(server.spec.model, 16))
    ]
    generate_all(server.url, cases, concurrency=16)
    time.sleep(2)
    status = drafter_status(server)
    assert status.live_sequences == 0
    assert status.refused == {}
    assert server.ssd()["live_sequences"] == 0
    assert status.free_slots == status.total_slots
    time.sleep(1)
    before = _cpu_seconds(server)
    time.sleep(3)
    shares = {pid: (after - before[pid]) / 3 for pid, after in _cpu_seconds(server).items()}
    figures.update(idle_share=round(sum(shares.values()), 4))
    assert shares[server.drafter_process().pid] < 0.03
    assert sum(shares.values()) < MAX_IDLE_SHARE


def test_target_and_drafter_run_on_cores_of_their_own(pool: ServerPool, spec_for: Any) -> None:
    """Red when the drafter keeps the affinity that it inherits, or the split is not logged."""
    server = pool.get(spec_for("self"))
    (scheduler,) = [p for p in server.family() if "sglang::scheduler" in " ".join(p.cmdline())]
    target, drafter = scheduler.cpu_affinity(), server.drafter_process().cpu_affinity()
    assert target
    assert drafter
    ours, drafters = _log_of_target_and_drafter(server)
    assert re.findall(r"SSD: rank 0 of 1 on cores (\S+) with", ours) == [format_cores(target)]
    assert format_cores(drafter) in re.findall(r"runs on cores (\S+)", drafters)
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(target) & set(drafter)


def test_the_drafter_starts_before_the_target_loads(pool: ServerPool, spec_for: Any) -> None:
    """Red when one model waits for the other, so that a start takes as long as both."""
    ours, _ = _log_of_target_and_drafter(pool.get(spec_for("self")))
    starts = re.search(r"SSD drafter \d+ starts: ", ours)
    loads = re.search(r"Load weight begin\.", ours)
    assert starts is not None
    assert loads is not None
    assert starts.start() < loads.start()


def _log_of_target_and_drafter(server: Server) -> tuple[str, str]:
    """One log has both, and marks the drafter's lines."""
    lines = server.log_text().splitlines()
    drafters = [line for line in lines if line.startswith(DRAFTER_MARK)]
    ours = [line for line in lines if not line.startswith(DRAFTER_MARK)]
    return "\n".join(ours), "\n".join(drafters)


def _cpu_seconds(server: Server) -> dict[int, float]:
    times = {process.pid: process.cpu_times() for process in server.family()}
    return {pid: spent.user + spent.system for pid, spent in times.items()}


def test_two_servers_side_by_side(pool: ServerPool, reference: Reference, spec_for: Any) -> None:
    """Red when two servers share an endpoint, a port or a drafter."""
    first = pool.get(spec_for("self"))
    second = pool.start(spec_for("random")).wait_until_ready()
    try:
        assert first.drafter_endpoint() != second.drafter_endpoint()
        cases = [
            Request(prompt.input_ids, {"max_new_tokens": 32})
            for prompt in load_prompts(first.spec.model, 6)
        ]
        with ThreadPoolExecutor(2) as clients:
            both = [clients.submit(generate_all, s.url, cases) for s in (first, second)]
            for answers in both:
                assert_same(reference, cases, answers.result())
        assert first.ssd()["correct_drafts"] > 0
        assert second.ssd()["on_time_rows"] > 0
    finally:
        second.stop(signal.SIGTERM)
    assert first.healthy()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server_that_is_stopped_at_its_start(
    how: signal.Signals, pool: ServerPool, spec_for: Any
) -> None:
    """Red when a process that was just started does not notice that its parent has gone."""
    server = pool.start(spec_for("random"))
    deadline = time.monotonic() + 300
    while len(server.family()) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(server.family()) >= 3, server.log_tail()
    server.stop(how)


@pytest.mark.parametrize(
    ("kind", "how"),
    [("self", signal.SIGINT), ("random", signal.SIGTERM), ("noisy", signal.SIGKILL)],
)
def test_nothing_is_left_of_a_stopped_server(
    kind: DrafterKind, how: signal.Signals, pool: ServerPool, spec_for: Any
) -> None:
    """Red when a process of ours, or a drafter's socket, outlives its server."""
    server = pool.take(spec_for(kind))
    socket = Path(server.drafter_endpoint().removeprefix("ipc://"))
    assert socket.exists()
    # SGLang lets a running answer end before it stops, unless it is killed.
    case = Request("Once upon a time", {"max_new_tokens": 60, "ignore_eos": True})
    with ThreadPoolExecutor(1) as clients:
        busy = clients.submit(stream, server.url, case)
        time.sleep(1)
        server.stop(how)
        busy.exception()
    assert how is signal.SIGKILL or not socket.exists()
