"""Two minutes of test/faults/chaos.py, and a server's own drafter killed over and over."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults import chaos
from harness.client import generate_all
from harness.drafter_faults import assert_drafts_again, wait_until_ready
from harness.idle import assert_drained
from harness.reference import Reference
from harness.server import Server, ServerPool
from harness.size import CI, Size

NUM_KILLS = 12
QUICK_RESTARTS = (
    ("restart_delay_s", 0.1),
    ("restart_delay_max_s", 0.4),
    ("restart_healthy_s", 1.0),
)


@pytest.mark.parametrize(
    "is_timed",
    [
        pytest.param(False, id="two-minutes"),
        pytest.param(True, id="timed", marks=[pytest.mark.slow, pytest.mark.timeout(5400)]),
    ],
)
def test_faults_cost_speed_and_nothing_else(
    is_timed: bool, target: Path, size: Size, figures: dict[str, Any]
) -> None:
    """Red when a fault changes or loses an answer, keeps hits away, or leaves something behind.

    How soon hits return is judged by the slow run: what runs for every change may share its
    machine.
    """
    num_cases = chaos.NUM_CASES if is_timed else chaos.IN_FLIGHT + 1
    num_faults = size.num_faults if is_timed else CI.num_faults
    result = chaos.run(str(target), num_faults=num_faults, seed=2, num_cases=num_cases)
    figures.update(hit_share=result.hit_share, answers=result.num_answers, rows=result.rows)
    figures["faults"] = dict(Counter(outcome.kind for outcome in result.outcomes))
    figures["longest_return_s"] = max(outcome.return_s for outcome in result.outcomes)
    assert result.failures() == []
    assert len(result.outcomes) == num_faults
    assert {outcome.kind for outcome in result.outcomes} == set(chaos.WEIGHTS)
    if is_timed:
        assert result.slow_returns() == []


@pytest.mark.timeout(3600)
def test_a_dozen_drafters_die_under_load(
    pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when a server's own drafter is not started again, changes or loses an answer by its
    death, or leaves a process, an open file or a sequence.

    Every other one is killed while it still loads.
    """
    server = pool.take(spec_for("noisy", settings=QUICK_RESTARTS))
    try:
        cases = chaos.make_cases(server.spec.model)
        expected = generate_all(server.url, cases, concurrency=chaos.IN_FLIGHT)
        before = chaos.Count.of(server)
        load = chaos.Load(server.url, cases, expected)
        load.start()
        killed = []
        for index in range(NUM_KILLS):
            if index % 2 == 0:
                wait_until_ready(server)
            else:
                time.sleep(0.5 * index)
            killed.append(kill_drafter(server))
        wait_until_ready(server)
        load.stop()
        assert load.lost == []
        assert load.wrong_answers(server) == []
        assert len(set(killed)) == NUM_KILLS
        assert_drafts_again("noisy", server, reference)
        assert_drained(server)
        assert not any(psutil.pid_exists(pid) for pid in killed)
        chaos.wait_until(lambda: chaos.Count.of(server).fds <= before.fds, "as few open files")
        assert chaos.Count.of(server).processes == before.processes
    finally:
        server.stop()


def kill_drafter(server: Server) -> int:
    """The pid of the one that was killed."""
    chaos.wait_until(lambda: bool(server.drafter_processes()), "a drafter")
    drafter = server.drafter_process()
    drafter.send_signal(signal.SIGKILL)
    chaos.wait_until(lambda: drafter not in server.drafter_processes(), "the death of a drafter")
    return drafter.pid
