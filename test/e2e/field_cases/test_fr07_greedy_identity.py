"""FR-07: greedy output is plain decoding's, alone, in a batch and streamed.

In bfloat16 a verify of several rows and a decode of one round differently, so there a difference
must lie between two tokens that the reference itself hardly tells apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all, stream
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafted
from harness.server import Server, ServerPool, ServerSpec
from harness.size import Size

BF16 = ("--dtype", "bfloat16")
MAX_BF16_GAP = 0.125
"""Between the logprobs of two tokens; a step of bfloat16 is as much at logits of 16 to 32."""
ODD = ("ids-three-ones", "one-token", "repeat-the")


def test_fr_07(
    kind: DrafterKind, server: Server, reference: Reference, size: Size, figures: dict[str, Any]
) -> None:
    """Red when a draft is committed unverified, a rollback is off by one, or a token is doubled.

    Differences by rounding are told from errors by the reference's own logits. Other K are in
    test_configurations.py.
    """
    prompts = load_prompts(server.spec.model, 40)
    chosen = [p for i, p in enumerate(prompts) if i < size.num_prompts or p.name in ODD]
    cases = [Request(p.input_ids, {"max_new_tokens": size.num_tokens}) for p in chosen]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=4)
    figures.update(counter.since().summary(), rounding=len(assert_same(reference, cases, answers)))
    assert_drafted(kind, answers)
    odd = [case for case, p in zip(cases, chosen, strict=True) if p.name in ODD]
    assert_same(reference, odd, [stream(server.url, case).answer for case in odd])


def test_fr_07_bf16(
    kind: DrafterKind,
    target: Path,
    pool: ServerPool,
    reference_pool: ServerPool,
    spec_for: Any,
    size: Size,
    figures: dict[str, Any],
) -> None:
    """Red when the first difference of an answer in bfloat16 is more than rounding."""
    settings = (("drafter_dtype", "bfloat16"),)
    server = pool.get(spec_for(kind, flags=BF16, settings=settings))
    plain = ServerSpec(model=str(target), flags=(*BF16, "--disable-overlap-schedule"))
    reference = Reference(reference_pool, plain)
    prompts = load_prompts(server.spec.model, size.num_prompts)
    cases = [Request(p.input_ids, {"max_new_tokens": size.num_tokens}) for p in prompts]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=4)
    found = assert_same(reference, cases, answers, max_gap=MAX_BF16_GAP, num_rounded=len(cases))
    gaps = [divergence.gap for divergence in found]
    figures.update(counter.since().summary(), rounding=len(found), largest_gap=max(gaps, default=0))
    assert_drafted(kind, answers)
