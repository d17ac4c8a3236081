"""One drafter, started by hand, serves several servers and the replicas of one: docs/operations.md.

The two servers ask for different numbers of drafts. One that a test has ended is started again for
the next.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests as http

from harness import replicas
from harness.checkpoints import make_drafter
from harness.client import Request, generate_all, in_background
from harness.drafter_faults import assert_drafts_again, long_requests, reload, status
from harness.hand_drafter import drafter_by_hand
from harness.idle import assert_drained, assert_only_running, drafter_status
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server, ServerPool

pytestmark = pytest.mark.timeout(1800)
"""Whichever test is first starts the drafter, two servers and the reference."""

NUM_STEPS = (4, 2)
"""Of the two servers."""
MAX_SEQUENCES = 8
SETTINGS = {"fan_out": [4], "lease_s": 5.0}
"""Of the drafter. So long it keeps the sequences of a server that was killed."""
CONCURRENCY = 3
"""Requests of each server under way; the drafter has room for both servers'."""
CROWDING = {"max_new_tokens": 600, "ignore_eos": True}
"""Of requests that outlast two of another server."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('shared')}/drafter"


@pytest.fixture(scope="module")
def drafter(target: Path, endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    flags = ("--max-sequences", str(MAX_SEQUENCES))
    model = make_drafter("noisy", target)
    with drafter_by_hand(model, endpoint, *flags, settings=SETTINGS) as process:
        yield process


@pytest.fixture(scope="module")
def second_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """The other pool has one server at a time."""
    servers = ServerPool(tmp_path_factory.mktemp("second"))
    yield servers
    servers.stop_all()


@pytest.fixture
def pair(
    drafter: subprocess.Popen[bytes],
    endpoint: str,
    pool: ServerPool,
    second_pool: ServerPool,
    spec_for: Any,
) -> tuple[Server, Server]:
    first, second = (
        spec_for("noisy", num_steps=num_steps, settings=(("endpoint", endpoint), *ignored))
        for num_steps, ignored in zip(NUM_STEPS, ((("fan_out", 1),), ()), strict=True)
    )
    return pool.get(first), second_pool.get(second)


def assert_is_theirs(drafter: subprocess.Popen[bytes], server: Server) -> None:
    """The server serves with this drafter and with no other."""
    assert drafter.poll() is None
    assert not server.drafter_processes()
    for state in status(server)["replicas"]:
        assert (state["state"], state["drafter_pid"]) == ("ready", drafter.pid)
        assert (state["drafter_alive"], state["drafter_model"]) == (None, None)


def test_settings_of_the_drafter_are_not_the_servers(pair: tuple[Server, Server]) -> None:
    """Red when a server that was given some does not say that they are without effect, or says it
    of what it was not given."""
    given = "--ssd-drafter-dtype, --ssd-drafter-max-total-tokens"  # by every server of the tests
    for server, flags in zip(pair, (f"--ssd-fan-out, {given}", given), strict=True):
        said = re.findall(r"(--ssd-\S.*): without effect, (.*)", server.log_text())
        assert said == [(flags, "because the drafter at --ssd-endpoint has settings of its own")]


def test_both_are_served_at_the_same_time(
    pair: tuple[Server, Server],
    drafter: subprocess.Popen[bytes],
    reference: Reference,
    figures: dict[str, Any],
) -> None:
    """Red when a drafter serves one server after the other, takes two requests of one name for the
    same, drafts as many steps for all as for one, or keeps what has ended."""
    params = {"max_new_tokens": 48, "ignore_eos": True}
    prompts = load_prompts(pair[0].spec.model, 8)
    cases = [
        Request(prompt.input_ids, params, {"rid": f"of-both-{index}"})
        for index, prompt in enumerate(prompts)
    ]
    counters = [RoundCounter(server) for server in pair]
    most_held = 0
    with ThreadPoolExecutor(2) as clients:
        both = [
            clients.submit(generate_all, server.url, cases, concurrency=CONCURRENCY)
            for server in pair
        ]
        while not all(answers.done() for answers in both):
            most_held = max(most_held, drafter_status(pair[0]).live_sequences)
            time.sleep(0.1)
    assert CONCURRENCY < most_held <= 2 * CONCURRENCY
    for server, counter, answers in zip(pair, counters, both, strict=True):
        assert_same(reference, cases, answers.result())
        rounds = counter.since()
        figures[f"K = {server.spec.num_steps}"] = rounds.summary()
        assert_drafting("noisy", rounds)
        assert "full" not in rounds.plain_decode
        assert_is_theirs(drafter, server)
        assert server.ssd()["bad_replies"] == 0
        assert max(map(int, server.ssd()["accept_lens"])) == server.spec.num_steps + 1
        assert_drained(server)


def test_a_server_that_finds_no_room_decodes_plainly(
    pair: tuple[Server, Server], reference: Reference
) -> None:
    """Red when requests of one server take the place of another's, wait for it, or get no drafts
    once there is room."""
    crowding, late = pair
    prompts = load_prompts(crowding.spec.model, MAX_SEQUENCES)
    crowded, told = RoundCounter(crowding), RoundCounter(late)
    crowd = [in_background(crowding.url, Request(p.input_ids, CROWDING)) for p in prompts]
    try:
        assert_only_running(crowding, MAX_SEQUENCES, limit_s=10)
        cases = long_requests(late)
        assert_same(reference, cases, generate_all(late.url, cases))
        assert not any(one.done() for one in crowd), "they do not outlast the others"
    finally:
        assert http.post(f"{crowding.url}/abort_request", json={"abort_all": True}, timeout=60).ok
    rounds = told.since()
    assert rounds.plain_decode.get("full", 0) > 0
    assert rounds.drafted_rows == 0
    assert {one.result().answer.finish["type"] for one in crowd} == {"abort"}
    rounds = crowded.since()
    assert_drafting("noisy", rounds)
    assert "full" not in rounds.plain_decode
    assert_drained(crowding)
    assert_drafts_again("noisy", late, reference)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_one_server_ends_and_the_other_goes_on(
    how: signal.Signals,
    pair: tuple[Server, Server],
    drafter: subprocess.Popen[bytes],
    reference: Reference,
) -> None:
    """Red when the end of a server ends its drafter, takes the socket away, costs another server
    its drafts, or leaves a sequence: what a killed one cannot close ends with its lease."""
    staying, leaving = pair
    kept, ended = long_requests(staying)
    counter = RoundCounter(staying)
    running = [in_background(server.url, kept) for server in pair]
    running.append(in_background(leaving.url, ended))
    leaving.stop(how)
    assert_same(reference, [kept], [running[0].result().answer])
    if how is signal.SIGTERM:
        assert_only_running(staying, 0)  # before the lease would end what was left open
    for one in running[1:]:
        was_cut = one.exception(timeout=60) is not None
        assert was_cut == (how is signal.SIGKILL), "SGLang finishes what runs at a SIGTERM"
    assert_drafts_again("noisy", staying, reference)
    assert "drafter_down" not in counter.since().plain_decode
    assert_is_theirs(drafter, staying)
    assert_drained(staying)


def test_the_replicas_of_a_server_share_it(
    drafter: subprocess.Popen[bytes],
    endpoint: str,
    pool: ServerPool,
    reference: Reference,
    spec_for: Any,
) -> None:
    """Red when a replica is taken for another, starts a drafter all the same, or is told to
    exchange one that is not its own."""
    spec = spec_for("noisy", flags=replicas.FLAGS, settings=(("endpoint", endpoint),))
    server = pool.get(spec)
    cases = long_requests(server, 4)
    assert_same(reference, cases, generate_all(server.url, cases))
    states = status(server)["replicas"]
    assert len(states) == replicas.NUM_REPLICAS
    assert all(state["hits"] > 0 and state["correct_drafts"] > 0 for state in states)
    assert_is_theirs(drafter, server)
    assert_drained(server)
    refused = reload(server)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "dp_rank 0, 1: the drafter was not started by this server: start another one at its "
        "endpoint"
    )
    assert_is_theirs(drafter, server)
