"""What must hold of a drafter at any moment, checked against forwards that know no slots and no
tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_ssd.core.shared_noise import rank_candidates
from sglang_ssd.drafter.model_step import BranchRows, ExtendRow, ModelStep
from sglang_ssd.wire.messages import DraftRule
from toys.toy_target import Reply, ToyTarget
from toys.tree import guesses

FLOAT64 = 1e-9  # rounding of the toy model


class ReferenceModel(ModelStep, Protocol):
    """A draft model with an independent forward beside it, and a look at its KV."""

    def reference(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, V] and KV of a plain causal forward that knows no slots."""
        ...

    def kv(self, slots: Sequence[int]) -> torch.Tensor: ...


class RecordingModel:
    """A model that keeps the logits of its branch steps by the slot that each row wrote."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self.calls: list[tuple[str, int]] = []
        self.branch_logits: dict[int, torch.Tensor] = {}
        self.vocab_size, self.context_len = model.vocab_size, model.context_len
        self.total_slots = model.total_slots
        self.reference, self.kv = model.reference, model.kv

    def extend(self, rows: Sequence[ExtendRow]) -> torch.Tensor:
        self.calls.append(("extend", sum(len(row.token_ids) for row in rows)))
        for slot in _new_slots(rows):
            self.branch_logits.pop(slot, None)  # written anew
        return self._model.extend(rows)

    def branch_step(self, rows: Sequence[BranchRows]) -> torch.Tensor:
        self.calls.append(("branch", sum(len(row.token_ids) for row in rows)))
        logits = self._model.branch_step(rows)
        self.branch_logits.update(zip(_new_slots(rows), logits, strict=True))
        return logits


def _new_slots(rows: Sequence[ExtendRow] | Sequence[BranchRows]) -> list[int]:
    return [slot for row in rows for slot in row.kv_slots[-len(row.token_ids) :].tolist()]


def largest_kv_difference(target: ToyTarget) -> float:
    """Of every live line's KV to a prefill of its tokens from scratch; NaN: a slot is unwritten."""
    largest = 0.0
    for seq in target.loop.table:
        if seq.cache.trunk_len:
            _, expected = target.model.reference(seq.cache.tokens[: seq.cache.trunk_len])
            difference = float((target.model.kv(seq.cache.slots) - expected).abs().max())
            largest = difference if math.isnan(difference) else max(largest, difference)
    return largest


def largest_branch_difference(target: ToyTarget, model: RecordingModel) -> tuple[float, int]:
    """Of every recorded row's logits to a causal forward over prefix, chain and branch.

    Also returns how many rows it saw: all that a live line or branch still has.
    """
    differences: dict[int, float] = {}
    for seq in target.loop.table:
        cache = seq.cache
        lines = [(cache.tokens, list(cache.slots), 0)]
        for guess in guesses(cache):
            start = cache.committed_len + guess.position
            lines.append((cache.tokens[:start] + guess.line, guess.slots, start))
        for tokens, slots, start in lines:
            differences |= _line_differences(model, tokens, slots, start)
    largest = max(differences.values(), key=lambda one: (math.isnan(one), one), default=0.0)
    return largest, len(differences)


def _line_differences(
    model: RecordingModel, tokens: list[int], slots: list[int], start: int
) -> dict[int, float]:
    """By recorded slot; slots hold the tokens from start on."""
    recorded = [(at, slot) for at, slot in enumerate(slots, start) if slot in model.branch_logits]
    if not recorded:
        return {}
    last, _ = recorded[-1]
    logits, _ = model.reference(tokens[: last + 1])
    return {
        slot: float((model.branch_logits[slot] - logits[at]).abs().max()) for at, slot in recorded
    }


def largest_branch_difference_when_idle(
    target: ToyTarget, model: RecordingModel
) -> tuple[float, int]:
    """The same of all that is recorded by the time the drafter has nothing left to do."""
    target.run_until_idle()
    return largest_branch_difference(target, model)


def assert_kv_is_fresh(target: ToyTarget) -> None:
    assert largest_kv_difference(target) < FLOAT64


def assert_branch_logits_are_causal(target: ToyTarget, model: RecordingModel) -> int:
    """Returns how many rows it saw."""
    difference, seen = largest_branch_difference(target, model)
    assert difference < FLOAT64
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


def continuation(
    model: ReferenceModel, tokens: list[int], rule: DraftRule, count: int
) -> list[int]:
    """What the draft model says after `tokens`, one token at a time."""
    line = list(tokens)
    for _ in range(count):
        logits, _ = model.reference(line)
        line.append(int(rank_candidates(logits[-1:], [rule], [len(line) - 1], 1)[0, 0]))
    return line[len(tokens) :]
