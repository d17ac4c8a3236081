"""FR-07: greedy output is plain decoding's, alone, in a batch and streamed."""

from __future__ import annotations

from typing import Any

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all, stream
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafted
from harness.server import Server
from harness.size import Size

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
