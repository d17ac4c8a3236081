"""Many long requests lose their drafter: the next one is told of them in slices, and none waits."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from harness.client import Request, Stream, generate_all, in_background
from harness.drafter_faults import status
from harness.idle import assert_drained
from harness.prompts import ids_of_length
from harness.reference import Reference, assert_same
from harness.server import Server, ServerPool

NUM_REQUESTS = 8
PROMPT_LEN = 150
SHORT, LONG = 120, 640
"""Tokens of an answer; a long one outlasts a drafter and the loading of the next."""
LEAST_MS, MOST_MS = 500, 10000
"""Bounds of the reply deadline."""
SETTINGS = (
    ("resync_tokens", 1),  # at least one request is told, so this is one a round
    ("reply_deadline_min_ms", LEAST_MS),
    ("reply_deadline_ms", MOST_MS),
    ("prefill_slice_tokens", 32),  # a row that has drafts waits for one slice of another's prompt
    ("fan_out", 1),
)
LAG_S = 1.0
"""Of a client behind the rounds. No drafter comes up within it."""


class Run(msgspec.Struct, frozen=True):
    """All the requests at once, from when each had its first token."""

    streams: list[Stream]
    begun: float
    struck: float
    """When the drafter was gone, if it was killed."""
    looks: list[dict[str, Any]]
    """At the state of the server, one after the other."""

    @property
    def longest_gap(self) -> float:
        return max(stream.longest_gap_since(self.begun) for stream in self.streams)


def cases_of(server: Server, num_tokens: int) -> list[Request]:
    """Their prompts begin differently, so that each is read for itself."""
    prompts = [ids_of_length(server.spec.model, PROMPT_LEN + i) for i in range(NUM_REQUESTS)]
    return [Request(ids, {"max_new_tokens": num_tokens, "ignore_eos": True}) for ids in prompts]


def run(server: Server, num_tokens: int, *, kill: bool = False) -> Run:
    def look() -> dict[str, Any]:
        (replica,) = status(server)["replicas"]
        return replica

    running = [in_background(server.url, case) for case in cases_of(server, num_tokens)]
    begun, looks = time.monotonic(), [look()]
    if kill:
        drafter = server.drafter_process()
        drafter.kill()
        drafter.wait(60)
    struck = time.monotonic()
    while not all(one.done() for one in running):
        looks.append(look())
        time.sleep(0.02)
    looks.append(look())
    streams = [one.result() for one in running]
    return Run(streams=streams, begun=begun, struck=struck, looks=looks)


@pytest.mark.timeout(1800)
def test_a_drafter_that_is_back_is_told_in_slices_and_nobody_waits(
    pool: ServerPool, reference: Reference, spec_for: Any, figures: dict[str, Any]
) -> None:
    """Red when --ssd-resync-tokens is not kept to, a request is told twice or never or gets no
    drafts again, or when those that run wait until the drafter, which takes much longer than a
    deadline, has read what it was told. Also when that deadline leaves its bounds."""
    server = pool.get(spec_for("self", settings=SETTINGS))
    generate_all(server.url, cases_of(server, 1), concurrency=NUM_REQUESTS)  # cached from here on
    step = run(server, SHORT).longest_gap
    assert step < MOST_MS / 2000, f"{step:.1f} s without a blow: too loaded to tell from a wait"
    found = run(server, LONG, kill=True)
    waits = [look["reply_deadline_ms"] for look in found.looks]
    figures.update(
        step_s=round(step, 3),
        longest_gap_s=round(found.longest_gap, 3),
        deadlines_ms=(min(waits), max(waits)),
    )
    assert_same(reference, cases_of(server, LONG), [stream.answer for stream in found.streams])
    assert found.longest_gap < MOST_MS / 1000, "a wait in vain lasts the deadline"
    assert LEAST_MS <= min(waits) <= max(waits) <= MOST_MS
    assert_told_in_slices(found.looks)
    for stream in found.streams:
        before = stream.tokens_by(found.struck + LAG_S)
        assert stream.answer.num_correct_drafts > before, "more than all that came before"
    assert_drained(server)


def assert_told_in_slices(looks: list[dict[str, Any]]) -> None:
    """Each request once, one a round at most; a look tells of one as a round does."""
    first, last = looks[0], looks[-1]
    assert last["restarts"] == first["restarts"] + 1
    assert last["resyncs"] == first["resyncs"] + NUM_REQUESTS
    for old, new in pairwise(looks):
        assert new["resyncs"] - old["resyncs"] <= new["rounds"] - old["rounds"] + 1
    assert any(first["resyncs"] < look["resyncs"] < last["resyncs"] for look in looks)
