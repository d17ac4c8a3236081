"""FR-07: greedy output is plain decoding's, alone, in a batch and streamed.

In bfloat16 a verify of several rows and a decode of one round differently, so there a difference
must lie between two tokens that the reference itself hardly tells apart, and no token of an answer
may be less likely to it than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all, stream
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server, ServerPool, ServerSpec
from harness.size import Size

BF16 = ("--dtype", "bfloat16")
MAX_BF16_GAP = 0.125
"""Between the logprobs of two tokens; a step of bfloat16 is as much at logits of 16 to 32."""
LOGPROB_ERROR = 1e-5
"""Of a difference of two logprobs in float32, where the logits differ by a step exactly."""
ODD = ("ids-three-ones", "one-token", "repeat-the")


def test_fr_07(
    kind: DrafterKind, server: Server, reference: Reference, size: Size, figures: dict[str, Any]
) -> None:
    """Red when a draft is committed unverified, a rollback is off by one, or a token is doubled.

    Differences by rounding are told from errors by the reference's own logits.
    """
    prompts = load_prompts(server.spec.model, 40)
    chosen = [p for i, p in enumerate(prompts) if i < size.num_prompts or p.name in ODD]
    cases = [Request(p.input_ids, {"max_new_tokens": size.num_tokens}) for p in chosen]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=4)
    rounds = counter.since()
    assert_drafting(kind, rounds)
    figures.update(rounds.summary(), rounding=len(assert_same(reference, cases, answers)))
    odd = [case for case, p in zip(cases, chosen, strict=True) if p.name in ODD]
    assert_same(reference, odd, [stream(server.url, case).answer for case in odd])


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_fr_07_at_other_lengths(
    kind: DrafterKind,
    num_steps: int,
    pool: ServerPool,
    reference: Reference,
    spec_for: Any,
    size: Size,
    figures: dict[str, Any],
) -> None:
    """Red when a run of another length is cut or counted wrongly; the above has K = 4."""
    server = pool.get(spec_for(kind, num_steps=num_steps))
    prompts = load_prompts(server.spec.model, size.num_prompts)
    cases = [Request(p.input_ids, {"max_new_tokens": size.num_tokens}) for p in prompts]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=4)
    rounds = counter.since()
    figures.update(rounds.summary(), rounding=len(assert_same(reference, cases, answers)))
    assert_drafting(kind, rounds)


def test_fr_07_bf16(
    kind: DrafterKind,
    target: Path,
    pool: ServerPool,
    reference_pool: ServerPool,
    spec_for: Any,
    size: Size,
    figures: dict[str, Any],
) -> None:
    """Red when the first difference of an answer in bfloat16 is more than rounding, or a token
    behind it is not the likeliest one but for rounding."""
    settings = (("drafter_dtype", "bfloat16"),)
    server = pool.get(spec_for(kind, flags=BF16, settings=settings))
    plain = ServerSpec(model=str(target), flags=(*BF16, "--disable-overlap-schedule"))
    reference = Reference(reference_pool, plain)
    prompts = load_prompts(server.spec.model, size.num_prompts)
    cases = [Request(p.input_ids, {"max_new_tokens": size.num_tokens}) for p in prompts]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=4)
    rounds = counter.since()
    assert_drafting(kind, rounds)
    found = assert_same(reference, cases, answers, max_gap=MAX_BF16_GAP, num_rounded=len(cases))
    gaps = [divergence.gap for divergence in found]
    figures.update(rounds.summary(), rounding=len(found), largest_gap=max(gaps, default=0))
    lacks = lacks_of(reference, cases, answers)
    figures["largest_lack"] = max(lacks)
    assert max(lacks) <= MAX_BF16_GAP + LOGPROB_ERROR


def lacks_of(
    reference: Reference, cases: Sequence[Request], answers: Sequence[Answer]
) -> list[float]:
    """By how much each token of the answers is less likely than the likeliest in its place, when
    the reference reads prompt and answer as one prompt.

    The first token that is read has no logprob, so the prompt's last one is read as well.
    """
    options = {"return_logprob": True, "top_logprobs_num": 1}
    whole = [
        Request(
            (*case.prompt, *answer.output_ids),  # type: ignore[arg-type]
            {"max_new_tokens": 1},
            {**options, "logprob_start_len": len(case.prompt) - 1},
        )
        for case, answer in zip(cases, answers, strict=True)
    ]
    lacks: list[float] = []
    read = generate_all(reference.server.url, whole, concurrency=4)
    for answer, one in zip(answers, read, strict=True):
        own = one.meta_info["input_token_logprobs"][1:]
        top = one.meta_info["input_top_logprobs"][1:]
        assert [token for _, token, *_ in own] == answer.output_ids
        lacks += [best[0][0] - entry[0] for entry, best in zip(own, top, strict=True)]
    return lacks
