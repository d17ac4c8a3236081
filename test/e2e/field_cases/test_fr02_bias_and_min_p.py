"""FR-02: a banned token that the drafter proposes is never accepted, and min-p is on every row."""

from __future__ import annotations

from collections import Counter

import msgspec

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all
from harness.draws import assert_same_draws, seeded
from harness.prompts import load_prompts, tokenizer_of
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server
from sglang_ssd.wire.messages import MAX_RULE_TOKENS

NUM_TOKENS = 48
NUM_UNTOLD = 20
NUM_UNTOLD_TOKENS = 64
BAN = -100.0
STRONGER = -101.0


def free_requests(model: str, num: int, num_tokens: int) -> list[Request]:
    prompts = load_prompts(model, num)
    return [Request(prompt.input_ids, {"max_new_tokens": num_tokens}) for prompt in prompts]


def biased(cases: list[Request], bias: dict[str, float]) -> list[Request]:
    return [
        msgspec.structs.replace(case, params={**case.params, "logit_bias": bias}) for case in cases
    ]


def most_used(reference: Reference, cases: list[Request], num: int) -> list[int]:
    used = Counter(token for answer in reference.answers(cases) for token in answer.output_ids)
    return [token for token, _ in used.most_common(num)]


def test_fr_02(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when the bias acts on some rows of a verify only, or on a neighbour."""
    free = free_requests(server.spec.model, 8, NUM_TOKENS)
    used = most_used(reference, free, 9)
    banned = used[:5]
    wished = biased(free[:2], {str(used[-1]): 4.0})
    more = generate_all(server.url, wished, concurrency=2)
    assert_same(reference, wished, more)
    bans = biased(free, {str(token): BAN for token in banned})
    cases = [case for pair in zip(bans, free, strict=True) for case in pair]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=8)
    assert_drafting(kind, counter.since())
    assert_same(reference, cases, answers)
    assert not set(banned) & said_in(answers[::2])
    if kind == "self":
        assert all(answer.num_correct_drafts > 0 for answer in (*answers[::2], *more))


def said_in(answers: list[Answer]) -> set[int]:
    return {token for answer in answers for token in answer.output_ids}


def test_fr_02_what_the_drafter_is_not_told(
    kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when a banned token that the drafter proposes is accepted.

    A drafter hears of the strongest entries alone. So many stronger ones on other tokens keep the
    bans from it, and one with the target's weights proposes what is banned, which costs drafts.
    """
    free = free_requests(server.spec.model, NUM_UNTOLD, NUM_UNTOLD_TOKENS)
    banned = most_used(reference, free, 5)
    bans = {str(token): BAN for token in banned}
    last = len(tokenizer_of(server.spec.model)) - 1
    others = [token for token in range(last, 0, -1) if token not in banned][:MAX_RULE_TOKENS]
    untold = biased(free, {**bans, **{str(token): STRONGER for token in others}})
    counter = RoundCounter(server)
    answers = generate_all(server.url, untold, concurrency=8)
    assert_drafting(kind, counter.since())
    assert_same(reference, untold, answers)
    assert not set(banned) & said_in(answers)
    if kind == "self":
        told = generate_all(server.url, biased(free[:4], bans), concurrency=4)
        assert 0 < num_correct(answers[:4]) < num_correct(told)


def num_correct(answers: list[Answer]) -> int:
    return sum(answer.num_correct_drafts for answer in answers)


def test_fr_02_sampled(kind: DrafterKind, server: Server, drafts_off: Reference) -> None:
    """Red when min-p, or a bias above temperature 0, acts on some rows of a verify only."""
    bias = {"28": -100.0, "30": -100.0, "260": 2.0}
    for rule in ({"min_p": 0.3}, {"logit_bias": bias}):
        sampled = seeded(server.spec.model, 8, {"temperature": 1.5, **rule})
        counter = RoundCounter(server)
        answers = generate_all(server.url, sampled, concurrency=8)
        assert_drafting(kind, counter.since())
        assert_same_draws(drafts_off, sampled, answers)
