"""FR-22: a request whose client has gone, or that is aborted, is soon gone on both sides."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests as http

from harness.checkpoints import DrafterKind
from harness.client import Request, generate, generate_all, start_and_leave
from harness.idle import CLOSED_WITHIN_S, LEAVING_S, assert_drained, assert_only_running
from harness.prompts import STORY, encode, ids_of_length
from harness.reference import Reference, assert_same
from harness.server import Server
from harness.size import Size

LONG = {"max_new_tokens": 1500, "ignore_eos": True}
FILLING = {"max_new_tokens": 400, "ignore_eos": True}
"""SGLang lets as many run at once as will find room for what they may still say."""
MOST_RUNNING = 16
CHUNK = 16
"""Of the shared server. It reads a prompt of 1900 tokens for seconds."""
WHOLE_CHUNK = re.compile(rf"Prefill batch.*#new-token: {CHUNK},")
BEGUN_S = 0.3
ORDINARY = re.compile(r"(Prefill|Decode) batch|SSD rounds|HTTP/1.1\"? 200")
"""Lines of a server at work: SGLang's and ours of batches, one for each HTTP request."""


def other_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.strip() and not ORDINARY.search(line)]


def test_fr_22(
    kind: DrafterKind, size: Size, server: Server, reference: Reference, figures: dict[str, Any]
) -> None:
    """Red when a running, prefilling or queued request that nobody wants leaves anything behind,
    or slows what comes after."""
    story = encode(server.spec.model, STORY)
    after = [Request(story, {"max_new_tokens": 32}), Request(story[:-1], {"max_new_tokens": 32})]
    before = generate_all(server.url, after)
    logged = len(server.log_text())
    num_clients = max(MOST_RUNNING + 8, size.num_disconnects)
    chance = random.Random(22)
    with one_running(server, story):
        with ThreadPoolExecutor(num_clients) as clients:
            for index in range(num_clients):
                prompt = ids_of_length(server.spec.model, 400 + index) if index % 4 == 3 else story
                case = Request(prompt, LONG)
                clients.submit(start_and_leave, server.url, case, after_s=chance.uniform(0, 0.5))
        assert_only_running(server, 1, limit_s=LEAVING_S + CLOSED_WITHIN_S)
    assert_drained(server)
    lines = other_lines(server.log_text()[logged:])
    assert len(lines) <= num_clients + 1, lines[:10]
    answers = generate_all(server.url, after)
    assert_same(reference, after, answers)
    lengths = [answer.meta_info["spec_accept_length"] for answer in (*before, *answers)]
    figures["accept_lengths"] = lengths
    assert sum(lengths[2:]) >= 0.7 * sum(lengths[:2])
    assert kind != "self" or min(lengths[2:]) >= server.spec.num_steps


@contextmanager
def one_running(server: Server, prompt: tuple[int, ...]) -> Iterator[None]:
    """Beside a request that outlasts everything; without one an idle target closes all."""
    rid = "fr-22-neighbour"
    case = Request(prompt, {"max_new_tokens": 1900, "ignore_eos": True}, {"rid": rid})
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(generate, server.url, case)
        try:
            assert_only_running(server, 1, limit_s=10)
            yield
            assert not running.done(), "it has ended by itself: its length does not outlast this"
        finally:
            abort(server, rid=rid)
        assert running.result().finish["type"] == "abort"


def test_fr_22_each_end_beside_a_neighbour(server: Server) -> None:
    """Red when one way to end leaves its sequence to the idle target, which a busy one never is."""
    story = encode(server.spec.model, STORY)
    with one_running(server, story):
        generate(server.url, Request(story, {"max_new_tokens": 12}))
        assert_only_running(server, 1)
        start_and_leave(server.url, Request(story, LONG), after_s=1.0)
        assert_only_running(server, 1, limit_s=LEAVING_S + CLOSED_WITHIN_S)
        with all_running(server, story):
            assert_aborted_in_the_queue(server, story)
            start_and_leave(server.url, Request(story, LONG), after_s=1.0)
            time.sleep(LEAVING_S + 1.0)
        assert_only_running(server, 1)
    assert_drained(server)


def assert_aborted_in_the_queue(server: Server, prompt: tuple[int, ...]) -> None:
    rid = "queued-alone"
    with ThreadPoolExecutor(1) as clients:
        queued = clients.submit(generate, server.url, Request(prompt, LONG, {"rid": rid}))
        time.sleep(0.5)
        assert not queued.done()
        abort(server, rid=rid)
        answer = queued.result()
    assert answer.finish["type"] == "abort"
    assert answer.output_ids == []


@pytest.mark.parametrize(("length", "aborted"), [(1910, False), (1920, True)])
def test_fr_22_within_a_prompt_beside_a_neighbour(
    length: int, aborted: bool, server: Server
) -> None:
    """Red when a prompt whose client goes while it is read is read to its end all the same, or its
    sequence stays with the drafter. No other test's prompts begin as these do."""
    prompt, rid = ids_of_length(server.spec.model, length), f"reading-{length}"
    case = Request(prompt, {"max_new_tokens": 40, "ignore_eos": True}, {"rid": rid})
    with one_running(server, encode(server.spec.model, STORY)):
        before = num_chunks(server)
        if aborted:
            with ThreadPoolExecutor(1) as clients:
                reading = clients.submit(generate, server.url, case)
                wait_for_chunks(server, before + 2)
                abort(server, rid=rid)
                assert reading.result().finish["type"] == "abort"
        else:
            start_and_leave(server.url, case, after_s=BEGUN_S)
            time.sleep(LEAVING_S + 1.0)
        read = num_chunks(server)
        assert 0 < read - before < length // CHUNK
        assert_only_running(server, 1)
        assert num_chunks(server) <= read + 1, "the last one may have been under way"
    assert_drained(server)


def wait_for_chunks(server: Server, num: int) -> None:
    deadline = time.monotonic() + 30
    while num_chunks(server) < num:
        assert time.monotonic() < deadline, "the prompt is not being read"
        time.sleep(0.05)


def num_chunks(server: Server) -> int:
    return len(WHOLE_CHUNK.findall(server.log_text()))


@contextmanager
def all_running(server: Server, prompt: tuple[int, ...]) -> Iterator[None]:
    """As many as may run beside the neighbour, so that what comes is queued; aborted at the end."""
    rids = [f"fr-22-{index}" for index in range(MOST_RUNNING - 1)]
    cases = [Request(prompt, FILLING, {"rid": rid}) for rid in rids]
    with ThreadPoolExecutor(len(cases)) as clients:
        running = [clients.submit(generate, server.url, case) for case in cases]
        try:
            assert_only_running(server, MOST_RUNNING, limit_s=60)
            yield
            assert not any(one.done() for one in running), "a place was free"
        finally:
            for rid in rids:
                abort(server, rid=rid)
        assert {one.result().finish["type"] for one in running} == {"abort"}


def abort(server: Server, **which: Any) -> None:
    http.post(f"{server.url}/abort_request", json=which, timeout=30)


def test_fr_22_abort_request(server: Server, reference: Reference) -> None:
    """Red when /abort_request answers 200 and does nothing, or hits another request."""
    story = encode(server.spec.model, STORY)
    named = [Request(story, LONG, {"rid": f"fr-22-{index}"}) for index in range(3)]
    plain = Request(story, {"max_new_tokens": 40})
    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(generate, server.url, case) for case in named]
        time.sleep(1.0)
        beside = clients.submit(generate, server.url, plain)
        for rid in ("fr-22-0", "nobody"):
            abort(server, rid=rid)
        assert running[0].result().finish["type"] == "abort"
        assert_same(reference, [plain], [beside.result()])
        assert not running[1].done()
        assert_only_running(server, 2)
        abort(server, abort_all=True)
        assert {one.result().finish["type"] for one in running} == {"abort"}
    assert_drained(server)


def test_fr_22_abort_all_of_more_than_run(server: Server) -> None:
    """Red when what waits in the queue outlives an abort of all, or its client waits for ever."""
    story = encode(server.spec.model, STORY)
    cases = [Request(story, FILLING)] * (MOST_RUNNING + 4)
    with ThreadPoolExecutor(len(cases)) as clients:
        futures = [clients.submit(generate, server.url, case) for case in cases]
        assert_only_running(server, MOST_RUNNING, limit_s=60)
        assert not any(one.done() for one in futures)
        abort(server, abort_all=True)
        answers = [one.result() for one in futures]
    assert {answer.finish["type"] for answer in answers} == {"abort"}
    assert sum(not answer.output_ids for answer in answers) >= len(cases) - MOST_RUNNING
    assert_drained(server)
