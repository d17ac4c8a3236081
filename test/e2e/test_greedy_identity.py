"""Greedy output is the target's own, whatever the drafter is worth; so is that of a few seeds.

Each drafter serves through another way to start a server, so that those are run end to end too;
that of the noisy one has overlap scheduling, and at full size all three have.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all
from harness.draws import FILTERS, seeded, without_drafts
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import MIN_DRAFTED, MIN_DRAFTED_OF_SHORT, RoundCounter, assert_on_time
from harness.server import OVERLAP, Entry, ServerPool
from harness.size import FULL, Size

ENTRIES: dict[DrafterKind, Entry] = {
    "self": "launcher",
    "random": "sglang serve",
    "noisy": "sglang.launch_server",
}
ACCEPT_LENGTHS: dict[DrafterKind, tuple[float, float]] = {
    "self": (4.5, 5.0),
    "random": (1.0, 1.6),
    "noisy": (1.6, 4.5),
}
"""Where the accept length at K=4 must lie, or the drafter is not what its name says."""
NUM_SEEDS = 4


@pytest.mark.parametrize("kind", ["self", pytest.param("random", marks=pytest.mark.slow), "noisy"])
def test_greedy_output_is_the_targets_own(
    kind: DrafterKind,
    size: Size,
    pool: ServerPool,
    reference: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when a draft is committed unverified, or a rollback or a row is off by one."""
    settings = OVERLAP if kind == "noisy" or size == FULL else ()
    server = pool.get(spec_for(kind, entry=ENTRIES[kind], settings=settings))
    requests = [
        Request(prompt.input_ids, {"max_new_tokens": size.num_tokens})
        for prompt in load_prompts(server.spec.model, size.num_prompts)
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, requests, concurrency=4)
    rounds = counter.since()
    figures.update(rounds.summary(), sequences=len(requests))
    figures["rounding"] = len(assert_same(reference, requests, answers))
    assert_on_time(rounds, min_drafted=MIN_DRAFTED if size == FULL else MIN_DRAFTED_OF_SHORT)
    low, high = ACCEPT_LENGTHS[kind]
    rows = rounds.on_time_rows + rounds.missing_rows + rounds.prefill_rows
    assert low <= 1 + rounds.correct_drafts / rows <= high
    if kind == "self":
        assert rounds.served["jit"] > 0
        assert rounds.accept_length("jit") >= 0.95 * (server.spec.num_steps + 1)


def test_seeds_give_the_tokens_of_plain_decode(pool: ServerPool, spec_for: Any) -> None:
    """Red when a token depends on a draft: fresh noise for the bonus, or a filter that lags.

    Here for every change, on a server that is there already; test_sampled_identity has many seeds
    and compares with a server that has no drafter.
    """
    server = pool.get(spec_for("noisy", entry=ENTRIES["noisy"], settings=OVERLAP))
    for params in FILTERS.values():
        cases = seeded(server.spec.model, NUM_SEEDS, params)
        counter = RoundCounter(server)
        expected = generate_all(server.url, without_drafts(cases))
        assert counter.since().plain_decode["opt_out"] > 0
        assert counter.since().drafted_rows == 0
        answers = generate_all(server.url, cases)
        assert counter.since().correct_drafts > 0
        for case, want, have in zip(cases, expected, answers, strict=True):
            assert have.same_as(want), f"{case}: {want.output_ids} became {have.output_ids}"
