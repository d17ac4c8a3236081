"""The drafter's forwards: tokens of lines and branches in, KV and ranked candidates out.

Every forward serves all sequences that are ready for it. Ranking is the drafter's sampling: the
best candidate under the request's rule is the next draft, the runners-up are the guesses of the
bonus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from sglang_ssd.core.outcome_tree import IntArray
from sglang_ssd.core.shared_noise import rank_candidates
from sglang_ssd.drafter.branch_attention import branch_rows
from sglang_ssd.drafter.draft_shaping import is_shaped, shape_logits
from sglang_ssd.drafter.model_step import ExtendRow, ModelStep
from sglang_ssd.drafter.request_table import DraftedSequence, RequestTable
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.messages import DraftRule


class DraftingStats(msgspec.Struct):
    """Since start."""

    branch_steps: int = 0
    jit_steps: int = 0
    prefill_tokens: int = 0
    drafting_seconds: float = 0.0
    branch_step_seconds: float = 0.0


class Drafting:
    """Runs the model for the sequences of one table."""

    def __init__(
        self,
        *,
        model: ModelStep,
        table: RequestTable,
        tracer: Tracer,
        clock: Callable[[], float],  # seconds on the clock of time.monotonic
    ) -> None:
        self._model = model
        self._clock = clock
        self._table = table
        self._tracer = tracer
        self.stats = DraftingStats()

    def feed_lines(
        self,
        seqs: Sequence[DraftedSequence],
        counts: Sequence[int],
        *,
        name: str,
        prefill_tokens: int,
    ) -> float:
        """Feed the next counts[i] unfed tokens of each line; grow it while drafts are wanted.

        name and prefill_tokens, those of a prefill slice, are for the trace. Returns the seconds
        that the forward took.
        """
        new_slots = [self._table.slots_for(count) for count in counts]
        rows = [_extend_row(seq, slots) for seq, slots in zip(seqs, new_slots, strict=True)]
        started = self._clock()
        logits = self._model.extend(rows)
        complete = [i for i, seq in enumerate(seqs) if counts[i] == seq.num_unfed]
        lines = [seqs[i] for i in complete]
        logits = shape_logits(
            logits if len(complete) == len(seqs) else logits[complete],
            lines,
            [[seq.cache.drafts] if is_shaped(seq.rule) else None for seq in lines],
            [1] * len(lines),
        )
        ranked = self._rank(
            logits,
            seqs=lines,
            positions=[len(seq.cache.tokens) - 1 for seq in lines],
            width=max((seq.limits.line_width for seq in lines), default=0),
        )
        seconds = self._note(
            name, started, rows=len(seqs), tokens=sum(counts), prefill_tokens=prefill_tokens
        )
        candidates: dict[int, IntArray] = dict(zip(complete, ranked, strict=True))
        for i, (seq, slots) in enumerate(zip(seqs, new_slots, strict=True)):
            if self._table.holds(seq):
                seq.cache.feed(slots, candidates.get(i))
                grow_chain(seq)
            else:
                self._table.give_back(slots)
        return seconds

    def step_branches(self, seqs: Sequence[DraftedSequence]) -> float:
        """The next pass of each sequence's tree, whichever that is; returns its seconds."""
        passes = [seq.cache.next_pass() for seq in seqs]
        runs = [seq.cache.pass_runs() if is_shaped(seq.rule) else None for seq in seqs]
        new_slots = [self._table.slots_for(len(one.tokens)) for one in passes]
        rows = [
            branch_rows(
                one,
                prefix_len=seq.cache.committed_len - 1,
                line_slots=seq.line_slots[: seq.cache.trunk_len],
                new_slots=slots,
            )
            for seq, one, slots in zip(seqs, passes, new_slots, strict=True)
        ]
        started = self._clock()
        logits = self._model.branch_step(rows)
        logits = shape_logits(logits, seqs, runs, [len(slots) for slots in new_slots])
        ranked = self._rank(
            logits,
            seqs=[seq for seq, slots in zip(seqs, new_slots, strict=True) for _ in slots],
            positions=np.concatenate([one.positions for one in passes]).tolist(),
            width=max(seq.limits.branch_width for seq in seqs),
        )
        seconds = self._note("branch step", started, rows=len(ranked), sequences=len(seqs))
        self.stats.branch_steps += 1
        self.stats.branch_step_seconds += seconds
        start = 0
        for seq, slots in zip(seqs, new_slots, strict=True):
            end = start + len(slots)
            if self._table.holds(seq):
                self._table.add_pass(seq, slots, ranked[start:end])
            else:
                self._table.give_back(slots)
            start = end
        return seconds

    def _rank(
        self,
        logits: torch.Tensor,
        *,
        seqs: Sequence[DraftedSequence],
        positions: list[int],
        width: int,
    ) -> IntArray:  # [R, width]
        if not seqs:
            return np.zeros((0, 0), dtype=np.int64)
        logits = within_vocabularies(logits, [seq.limits.vocab_size for seq in seqs])
        rules: list[DraftRule] = [seq.rule for seq in seqs]
        return rank_candidates(logits, rules, positions, width)

    def _note(self, name: str, started: float, **args: object) -> float:
        ended = self._clock()
        self.stats.drafting_seconds += ended - started
        self._tracer.add(name, int(started * 1e9), int(ended * 1e9), **args)
        return ended - started


def within_vocabularies(
    logits: torch.Tensor,  # [R, V]
    sizes: Sequence[int],  # R, of each row's target; at most V
) -> torch.Tensor:  # [R, max(sizes)], a view of the input if all are equal
    """-inf where a row's target has no token: one target's size is nothing to the others."""
    widest = max(sizes)
    logits = logits[:, :widest]
    narrower = {size for size in sizes if size < widest}
    if narrower:
        logits = logits.clone()
    for size in narrower:
        rows = [row for row, one in enumerate(sizes) if one == size]
        logits[rows, size:] = -torch.inf
    return logits


def grow_chain(seq: DraftedSequence) -> None:
    """One more draft if the reply that is owed wants it and the line is fed."""
    if seq.num_unfed == 0 and len(seq.cache.drafts) < seq.answer.num_drafts:
        seq.cache.grow_chain()


def _extend_row(seq: DraftedSequence, new_slots: IntArray) -> ExtendRow:
    start, end = seq.cache.trunk_len, seq.cache.trunk_len + len(new_slots)
    seq.line_slots[start:end] = new_slots
    return ExtendRow(
        token_ids=np.array(seq.cache.tokens[start:end], dtype=np.int64),
        start=start,
        kv_slots=seq.line_slots[:end],
    )
