"""Open sequences and their KV slots: who holds which, and what happens when there are no more.

Slot s of the model's KV storage is free, or in exactly one sequence (its line or one of its
branches); slot 0 is padding. A sequence is admitted, and grows, only if the most that it can hold
(committed ids, num_steps drafts and all branch steps) fits beside the most that the others can
hold, so a slot that is asked for is always there. One that does not fit, or passes the context, is
refused: it keeps its place in the table as a name without slots, until it is closed. Such names are
bounded too, but keep out none that fits.

A row of the table is reused; its generation is bumped at every close. Whoever finishes a forward
for a row asks `holds` first, so a late write to a reused row is a no-op.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from sglang_ssd.core.outcome_tree import IntArray
from sglang_ssd.core.row_penalties import OutputHistory
from sglang_ssd.core.speculation_cache import SpeculationCache, Taken
from sglang_ssd.drafter.backup import Answer, most_catch_up
from sglang_ssd.wire.messages import DraftRule

Refused = Literal["full", "context"]

_NAMES_PER_ROW = 8
"""How many refused names are kept, per row of the table."""


class Limits:
    """What one target's sequences may need, from its num_steps and fan-out ([]: mode sync)."""

    __slots__ = (
        "branch_slots",
        "branch_width",
        "fan_out",
        "line_width",
        "max_committed_len",
        "num_steps",
        "vocab_size",
    )

    def __init__(
        self, *, num_steps: int, fan_out: list[int], context_len: int, vocab_size: int
    ) -> None:
        self.num_steps = num_steps
        self.fan_out = fan_out
        self.vocab_size = vocab_size
        self.branch_slots = sum(fan_out) * num_steps
        # To rank: the draft and the guesses beside it, or all guesses after a chain's end.
        self.branch_width = max(fan_out, default=0) + 1
        self.line_width = max(sum(fan_out), self.branch_width)
        # The deepest that is fed is e_{K-1} of a branch at position K: at committed_len + 2K - 1.
        deepest = 2 * num_steps - 1 if fan_out else num_steps
        self.max_committed_len = context_len - 1 - deepest

    def most_slots(self, committed_len: int) -> int:
        return committed_len + self.num_steps + self.branch_slots


class DraftedSequence:
    """One request of one target. `answer` and `round_id` are set while a reply is owed."""

    __slots__ = (
        "answer",
        "bonus_rank",
        "cache",
        "generation",
        "last_seen",
        "limits",
        "line_slots",
        "output",
        "peer",
        "refused",
        "reserved",
        "rid",
        "round_id",
        "row",
        "row_generation",
        "rule",
    )

    def __init__(
        self, *, peer: bytes, rid: str, generation: int, rule: DraftRule, limits: Limits, now: float
    ) -> None:
        self.peer = peer
        self.rid = rid
        self.generation = generation
        self.rule = rule
        self.limits = limits
        self.last_seen = now
        self.refused: Refused | None = None
        self.row = -1
        self.row_generation = -1
        self.reserved = 0
        self.cache = SpeculationCache(num_steps=limits.num_steps, committed_tokens=[0])
        self.line_slots: IntArray = (
            _NO_SLOTS  # [context] slots of the line, valid up to cache.trunk_len
        )
        self.round_id: int | None = None
        self.answer = Answer(num_drafts=0, served="none")
        self.bonus_rank = -1
        self.output = OutputHistory()

    @property
    def key(self) -> tuple[bytes, str]:
        return self.peer, self.rid

    @property
    def num_unfed(self) -> int:
        return len(self.cache.tokens) - self.cache.trunk_len

    def committed_output(self) -> OutputHistory:
        """What is committed behind the prompt, caught up now."""
        known = self.rule.prompt_len + len(self.output.tokens)
        self.output.extend(self.cache.tokens[known : self.cache.committed_len])
        return self.output

    @property
    def is_far_behind(self) -> bool:
        """A prompt, or what is left of one: fed in slices, and waited for in mode sync alone."""
        return self.num_unfed > most_catch_up(self.limits.num_steps)

    @property
    def wants_feed(self) -> bool:
        """The bonus has no KV. A draft may lack it: the next tree or extend takes it along."""
        return self.cache.trunk_len < self.cache.committed_len

    @property
    def wants_branches(self) -> bool:
        return bool(self.limits.fan_out) and not self.wants_feed and not self.cache.is_built


_NO_SLOTS: IntArray = np.zeros(0, dtype=np.int64)


class RequestTable:
    """Sequences by (peer, rid), rows with generations, and the free list."""

    def __init__(self, *, total_slots: int, max_sequences: int, context_len: int) -> None:
        self.total_slots = total_slots
        self.max_sequences = max_sequences
        self._context_len = context_len
        self._sequences: dict[tuple[bytes, str], DraftedSequence] = {}
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._row_generations = [0] * max_sequences
        self._free = np.arange(total_slots, 0, -1, dtype=np.int64)  # stack, top at _num_free - 1
        self._num_free = total_slots
        self._reserved = 0

    def __iter__(self) -> Iterator[DraftedSequence]:
        """Sequences that hold a row, oldest first; one that was rewound is new again."""
        return (seq for seq in self._sequences.values() if seq.refused is None)

    @property
    def num_live(self) -> int:
        return self.max_sequences - len(self._free_rows)

    @property
    def num_free_slots(self) -> int:
        return self._num_free

    def find(self, peer: bytes, rid: str) -> DraftedSequence | None:
        return self._sequences.get((peer, rid))

    def holds(self, seq: DraftedSequence) -> bool:
        """Whether results for this opening still have a place."""
        return seq.row >= 0 and self._row_generations[seq.row] == seq.row_generation

    def open(self, seq: DraftedSequence, tokens: list[int]) -> None:
        """Take the sequence in, or mark it refused. Its key must be free."""
        assert seq.key not in self._sequences, "close the older opening first"
        seq.refused = self._why_not(seq, len(tokens))
        if seq.refused is None and not self._free_rows:
            seq.refused = "full"
        if seq.refused is not None:
            self._keep_name(seq)
            return
        self._sequences[seq.key] = seq
        seq.row = self._free_rows.pop()
        seq.row_generation = self._row_generations[seq.row]
        seq.cache = SpeculationCache(num_steps=seq.limits.num_steps, committed_tokens=tokens)
        if seq.is_far_behind:  # a target that tells of it once more waits for no drafts
            seq.answer = Answer(num_drafts=0, served="prefill")
        seq.line_slots = np.zeros(self._context_len, dtype=np.int64)
        self._reserve(seq, len(tokens))

    def take(self, seq: DraftedSequence, new_tokens: list[int]) -> Taken | None:
        """Apply an outcome and re-link slots; None if the sequence is too large now and refused."""
        assert self.holds(seq), "only live sequences take outcomes"
        taken = seq.cache.take(new_tokens)
        self.give_back(taken.free_slots)
        start = taken.relink_position
        seq.line_slots[start : start + len(taken.relink_slots)] = taken.relink_slots
        why_not = self._why_not(seq, seq.cache.committed_len)
        if why_not is not None:
            self._refuse(seq, why_not)
            return None
        self._reserve(seq, seq.cache.committed_len)
        return taken

    def rewind(self, seq: DraftedSequence, committed_len: int) -> None:
        """Forget what was committed after committed_len, also what of it was counted as output.

        It goes to the end, or one that is rewound again and again would be read before all others.
        """
        self._sequences[seq.key] = self._sequences.pop(seq.key)
        self.give_back(seq.cache.rewind(committed_len))
        seq.output = OutputHistory()
        self._reserve(seq, committed_len)

    def add_pass(self, seq: DraftedSequence, slots: IntArray, candidates: IntArray) -> None:
        """A pass of the tree: slots [R], candidates [R, C]; the fed draft's slot joins the line."""
        start = seq.cache.trunk_len
        seq.cache.add_pass(slots, candidates)
        seq.line_slots[start : seq.cache.trunk_len] = seq.cache.slots[start:]

    def slots_for(self, count: int) -> IntArray:  # [count]
        """Slots off the free list; the caller puts them into a sequence or gives them back."""
        assert count <= self._num_free, "reservations keep enough slots free"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def close(self, seq: DraftedSequence) -> None:
        """Forget the sequence and free what it holds."""
        del self._sequences[seq.key]
        self._vacate(seq)

    def expire(self, *, before: float) -> int:
        """Close every sequence not heard of since `before`."""
        expired = [seq for seq in self._sequences.values() if seq.last_seen < before]
        for seq in expired:
            self.close(seq)
        return len(expired)

    def close_peer(self, peer: bytes) -> None:
        for seq in [seq for seq in self._sequences.values() if seq.peer == peer]:
            self.close(seq)

    def peers(self) -> set[bytes]:
        """Targets that have a sequence here."""
        return {seq.peer for seq in self._sequences.values()}

    def is_empty(self) -> bool:
        return not self._sequences

    def check_partition(self) -> None:
        """Every slot is in exactly one place, rows mirror caches, reservations add up."""
        held: list[int] = [0, *self._free[: self._num_free].tolist()]
        for seq in self:
            held.extend(seq.cache.all_slots())
            line = seq.line_slots[: seq.cache.trunk_len].tolist()
            assert line == seq.cache.slots, f"{seq.rid}: line_slots differ from the cache's"
            assert len(seq.cache.all_slots()) <= seq.reserved, (
                f"{seq.rid}: holds more than reserved"
            )
            assert self.holds(seq), f"{seq.rid}: its row belongs to another"
        assert sorted(held) == list(range(self.total_slots + 1)), "a slot is lost or held twice"
        assert self._reserved == sum(seq.reserved for seq in self), "reservations do not add up"
        assert self.num_live == sum(1 for _ in self), "rows leak"

    def _why_not(self, seq: DraftedSequence, committed_len: int) -> Refused | None:
        if committed_len > seq.limits.max_committed_len:
            return "context"
        others = self._reserved - seq.reserved
        if others + seq.limits.most_slots(committed_len) > self.total_slots:
            return "full"
        return None

    def _reserve(self, seq: DraftedSequence, committed_len: int) -> None:
        need = seq.limits.most_slots(committed_len)
        self._reserved += need - seq.reserved
        seq.reserved = need

    def _refuse(self, seq: DraftedSequence, why: Refused) -> None:
        seq.refused = why
        self.close(seq)
        self._keep_name(seq)

    def _keep_name(self, seq: DraftedSequence) -> None:
        """So that its commits hear why it is refused, if there is room for one name more."""
        if len(self._sequences) - self.num_live < _NAMES_PER_ROW * self.max_sequences:
            self._sequences[seq.key] = seq

    def _vacate(self, seq: DraftedSequence) -> None:
        if seq.row < 0:
            return
        self.give_back(seq.cache.release())
        self._reserved -= seq.reserved
        seq.reserved = 0
        seq.line_slots = _NO_SLOTS
        self._row_generations[seq.row] += 1
        self._free_rows.append(seq.row)
        seq.row = -1

    def give_back(self, slots: IntArray) -> None:
        """To the free list; they must be in no sequence."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
