"""What must hold of a drafter at any moment, checked against forwards that know no slots and no
tree."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from sglang_ssd.core.shared_noise import rank_candidates
from sglang_ssd.drafter.model_step import BranchRows
from sglang_ssd.wire.messages import DraftRule
from toys.toy_draft_model import ToyDraftModel
from toys.toy_target import Reply, ToyTarget


class RecordingModel(ToyDraftModel):
    """Keeps the logits of the last branch step by the slot that each row wrote."""

    def __init__(self, **settings: int) -> None:
        super().__init__(**settings)
        self.branch_logits: dict[int, torch.Tensor] = {}

    def branch_step(self, rows: Sequence[BranchRows]) -> torch.Tensor:
        logits = super().branch_step(rows)
        slots = [slot for row in rows for slot in row.kv_slots[-len(row.token_ids) :].tolist()]
        self.branch_logits = dict(zip(slots, logits, strict=True))
        return logits


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float64 rounding; NaN (a slot never written) is not."""
    difference = (actual - expected).abs().max()
    assert difference < 1e-9, f"differs by {difference}"


def assert_kv_is_fresh(target: ToyTarget) -> None:
    """Every live line's KV equals a prefill of its tokens from scratch."""
    for seq in target.loop.table:
        if seq.cache.trunk_len:
            _, expected = target.model.reference(seq.cache.tokens[: seq.cache.trunk_len])
            assert_same(target.model.kv(seq.cache.slots), expected)


def assert_branch_logits_are_causal(
    target: ToyTarget, model: RecordingModel, rng: random.Random
) -> int:
    """The last branch step's logits equal a causal forward over prefix, chain and branch.

    Looks at one row of every sequence; returns how many.
    """
    seen = 0
    for seq in target.loop.table:
        cache = seq.cache
        newest = cache.branch_step_slots()[-1].tolist() if cache.num_branch_steps else []
        if not newest or newest[0] not in model.branch_logits:
            continue
        row = rng.randrange(len(newest))
        fork = cache.committed_len + int(cache.branch_positions[row])
        branch = cache._branches.line(row)[: cache.num_branch_steps]
        logits, _ = model.reference(cache.tokens[:fork] + branch)
        assert_same(model.branch_logits[newest[row]], logits[-1])
        seen += 1
    return seen


def assert_replies_continue(target: ToyTarget, replies: list[Reply]) -> None:
    """Drafts are what the draft model itself says after the ids that the reply continues."""
    for reply in replies:
        request = target.requests.get(reply.rid)
        if request is None or reply.generation != request.generation or not reply.drafts:
            continue
        count = len(reply.drafts)
        logits, _ = target.model.reference(request.tokens[: reply.base] + reply.drafts[:-1])
        positions = list(range(reply.base - 1, reply.base - 1 + count))
        best = rank_candidates(logits[-count:], [request.rule] * count, positions, 1)
        assert reply.drafts == best[:, 0].tolist(), f"{reply} does not continue its ids"


def continuation(model: ToyDraftModel, tokens: list[int], rule: DraftRule, count: int) -> list[int]:
    """What the draft model says after `tokens`, one token at a time."""
    line = list(tokens)
    for _ in range(count):
        logits, _ = model.reference(line)
        line.append(int(rank_candidates(logits[-1:], [rule], [len(line) - 1], 1)[0, 0]))
    return line[len(tokens) :]
