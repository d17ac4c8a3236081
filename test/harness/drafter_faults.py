"""Blows to a server's drafter, and what must hold meanwhile and afterwards."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import requests

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all, stream
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server, ServerPool, ServerSpec, all_settings

if TYPE_CHECKING:
    from harness.replicas import Replica

NUM_TOKENS = 60
HEALTHY_S = 2.0
"""Limit of the product for an answer of a health check."""
TOLD = "affected requests decode plainly meanwhile"


def long_requests(server: Server | Replica, num: int = 2) -> list[Request]:
    prompts = load_prompts(server.spec.model, 8)
    chosen = [prompts[1], prompts[3], prompts[0], prompts[6]][:num]
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return [Request(prompt.input_ids, params) for prompt in chosen]


def status(server: Server) -> dict[str, Any]:
    overview: dict[str, Any] = requests.get(f"{server.url}/ssd/status", timeout=30).json()
    return overview


def wait_until_ready(server: Server, limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while (state := status(server))["state"] != "ready":
        assert time.monotonic() < deadline, state
        time.sleep(0.2)


@contextmanager
def without_drafter(server: Server) -> Iterator[None]:
    """The server's drafter is killed, and the one that takes its place loads when the block is
    over."""
    killed = server.drafter_process()
    killed.kill()
    killed.wait(60)
    deadline = time.monotonic() + 60
    while not (found := server.drafter_processes()):
        assert time.monotonic() < deadline, "no other drafter is started"
        time.sleep(0.01)
    (successor,) = found
    successor.suspend()
    try:
        yield
        assert status(server)["state"] == "restarting"
    finally:
        successor.resume()


def reload(server: Server, **body: str) -> requests.Response:
    return requests.post(f"{server.url}/ssd/reload_drafter", json=body, timeout=600)


def strike_in_mid_stream(
    kind: DrafterKind, server: Server, reference: Reference, blow: signal.Signals
) -> dict[str, Any]:
    """Strike the drafter under two streams, see the server serve on and the drafts come back.

    Returns figures.
    """
    cases = long_requests(server)
    deadline_s = all_settings(server.spec)["reply_deadline_ms"] / 1000
    step = min(_longest_gap(server, cases) for _ in range(3))
    assert step < deadline_s, (
        f"a step takes {step:.1f} s without any blow and the deadline is {deadline_s} s: this "
        "machine is too loaded to tell one wait from two"
    )
    before, drafter = status(server)["replicas"][0], server.drafter_process()
    told, start = server.log_text().count(TOLD), time.monotonic()

    def strike(num_chunks: int) -> None:
        if num_chunks == 4:
            drafter.send_signal(blow)

    with ThreadPoolExecutor(2) as clients:
        other = clients.submit(stream, server.url, cases[1])
        struck = stream(server.url, cases[0], on_chunk=strike)
        streams = [struck, other.result()]
    assert_same(reference, cases, [one.answer for one in streams])
    gap = max(one.longest_gap for one in streams)
    assert gap <= deadline_s + step + 0.1, "a second wait would add the deadline again"
    assert_serves_on(server, reference)
    minutes = (time.monotonic() - start) / 60
    assert TOLD in server.log_text()
    assert server.log_text().count(TOLD) - told <= 1 + minutes, "once, and again if it lasts"
    if blow is signal.SIGSTOP:
        assert status(server)["state"] == "degraded"
        drafter.send_signal(signal.SIGCONT)
    wait_until_ready(server)
    after = status(server)["replicas"][0]
    assert after["restarts"] - before["restarts"] == (blow is signal.SIGKILL)
    assert (after["drafter_pid"] == drafter.pid) == (blow is signal.SIGSTOP)
    if blow is signal.SIGKILL:
        assert f"process {drafter.pid} ended with signal 9" in after["last_error"]
    assert server.ssd()["last_error"] == after["last_error"], "/server_info tells the same"
    assert_drafts_again(kind, server, reference)
    return {
        "longest_gap_s": round(gap, 3),
        "step_s": round(step, 3),
        "deadline_s": deadline_s,
    }


def _longest_gap(server: Server, cases: list[Request]) -> float:
    """What one step may take here and now."""
    with ThreadPoolExecutor(len(cases)) as clients:
        streams = clients.map(functools.partial(stream, server.url), cases)
        return max(one.longest_gap for one in streams)


def assert_serves_on(server: Server, reference: Reference) -> list[Answer]:
    """Health does not depend on the drafter, idle or under load, nor does any answer."""
    assert_healthy(server)
    cases = long_requests(server, 4)
    with ThreadPoolExecutor(1) as clients:
        under_load = clients.submit(generate_all, server.url, cases)
        time.sleep(0.3)
        assert_healthy(server)
        answers = under_load.result()
    assert_same(reference, cases, answers)
    return answers


def assert_healthy(server: Server) -> None:
    for path in ("health", "health_generate"):
        start = time.monotonic()
        assert requests.get(f"{server.url}/{path}", timeout=10).status_code == 200
        assert time.monotonic() - start < HEALTHY_S, path


def assert_drafts_again(kind: DrafterKind, server: Server | Replica, reference: Reference) -> None:
    """Drafts are on time again, and hits return unless the drafter guesses at random. Within some
    batches; how soon depends on what else the machine does."""
    cases = long_requests(server, 4)
    again = RoundCounter(server)
    for _ in range(10):
        batch = RoundCounter(server)
        assert_same(reference, cases, generate_all(server.url, cases))
        hits_return = kind == "random" or again.since().hit_rate > 0
        if batch.since().on_time_rate > 0.9 and hits_return:
            break
    else:
        raise AssertionError(f"still without drafts or hits: {again.since()}")
    assert_drafting(kind, again.since())
    assert not server.ssd()["degraded"]


def assert_ends_at_start(pool: ServerPool, spec: ServerSpec, *says: str) -> str:
    """The server does not come up, and its log, which is returned, has every one of those texts."""
    server = pool.start(spec)
    try:
        assert server.wait(limit_s=240) != 0
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"still starting:\n{server.log_tail()}") from error
    finally:
        server.stop(signal.SIGKILL)
    log = server.log_text()
    for text in says:
        assert text in log, server.log_tail()
    return log


def stamp_of(text: str, log: str) -> datetime:
    """When SGLang, or the drafter, logged the only line that begins with that text; to a second."""
    begins = rf"^(?:\[drafter\] )?\[(\S+ \d\d:\d\d:\d\d)[^]]*\] {text}"
    (stamp,) = re.findall(begins, log, re.M)
    return datetime.fromisoformat(stamp)
