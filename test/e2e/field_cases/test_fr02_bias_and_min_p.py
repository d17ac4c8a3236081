"""FR-02: a banned token that the drafter proposes is never accepted, and min-p is on every row."""

from __future__ import annotations

from collections import Counter

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all
from harness.draws import assert_same_draws, seeded
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import Server

NUM_TOKENS = 48


def test_fr_02(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when the bias acts on some rows of a verify only, or on a neighbour."""
    prompts = load_prompts(server.spec.model, 8)
    free = [Request(prompt.input_ids, {"max_new_tokens": NUM_TOKENS}) for prompt in prompts]
    used = Counter(token for answer in reference.answers(free) for token in answer.output_ids)
    banned = [token for token, _ in used.most_common(5)]
    bias = {str(token): -100.0 for token in banned}
    biased = [
        Request(prompt.input_ids, {"max_new_tokens": NUM_TOKENS, "logit_bias": bias})
        for prompt in prompts
    ]
    wanted = {str(used.most_common(9)[-1][0]): 4.0}
    wished = [
        Request(prompt.input_ids, {"max_new_tokens": NUM_TOKENS, "logit_bias": wanted})
        for prompt in prompts[:2]
    ]
    more = generate_all(server.url, wished, concurrency=2)
    assert_same(reference, wished, more)
    cases = [case for pair in zip(biased, free, strict=True) for case in pair]
    answers = generate_all(server.url, cases, concurrency=8)
    assert_same(reference, cases, answers)
    assert not set(banned) & {token for answer in answers[::2] for token in answer.output_ids}
    if kind == "self":
        assert all(answer.num_correct_drafts > 0 for answer in (*answers[::2], *more))


def test_fr_02_sampled(server: Server, drafts_off: Reference) -> None:
    """Red when min-p, or a bias above temperature 0, acts on some rows of a verify only."""
    sampled = seeded(server.spec.model, 8, {"temperature": 1.5, "min_p": 0.3})
    bias = {"28": -100.0, "30": -100.0, "260": 2.0}
    sampled += seeded(server.spec.model, 8, {"temperature": 1.5, "logit_bias": bias})
    assert_same_draws(drafts_off, sampled, generate_all(server.url, sampled, concurrency=8))
