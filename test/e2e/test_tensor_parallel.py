"""Three ranks decide alike: rank 0 alone talks to the drafter."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checkpoints import KINDS, DrafterKind
from harness.client import Request, generate_all
from harness.draws import FILTERS, assert_same_draws, seeded
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_on_time
from harness.server import ServerPool


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_give_the_tokens_of_one(
    kind: DrafterKind,
    pool: ServerPool,
    reference: Reference,
    drafts_off: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when ranks see different drafts or draw for themselves: they hang, or speak junk."""
    server = pool.get(
        spec_for(kind, flags=("--tp-size", "3"), settings=(("reply_deadline_ms", 3000),))
    )
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": 32})
        for prompt in load_prompts(server.spec.model, 8)
    ]
    counter = RoundCounter(server)
    figures["greedy rounding"] = len(assert_same(reference, cases, generate_all(server.url, cases)))
    for name, params in FILTERS.items():
        draws = seeded(server.spec.model, 12, params)
        answers = generate_all(server.url, draws)
        figures[f"{name} rounding"] = assert_same_draws(drafts_off, draws, answers)
    rounds = counter.since()
    figures.update(rounds.summary())
    assert_on_time(rounds)
    if kind != "random":
        assert rounds.correct_drafts > 0
