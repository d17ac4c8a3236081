"""One request's tokens, KV slots and guesses on the drafter, and an outcome's walk through them.

    position   0 ..........  P   P+1 .. P+m     P = committed_len - 1, m <= num_steps
    tokens     committed ids b   d1  .. dm      b is the bonus (or the last prompt token)
    slots      s0 s1 ....... sP  ..             slots of a prefix of tokens: that part is "fed"
    candidates               C0  C1  .. Cm      C_j: the drafter's best tokens after position j of
                                                the chain, there iff it is fed; d_{j+1} is C_j[0]
    branch (j, c)            c e1 e2 ..         step s feeds c (s = 0) or e_s: one slot and ranking
                                                per branch and step; its best is e_{s+1}

Invariant: slot i holds the KV of tokens[0..i], and tokens[:committed_len] are the target's own.
Every slot handed in is in exactly one place (the line or one branch) until `take` or `release`
gives it back. Pure state: no device, no allocator, no SGLang. The owner copies `Taken.relink_slots`
into its table.

How a round uses it, in order:
    cache.take(new_tokens)              outcome in; on a hit the drafts are ready: reply
    cache.feed(slots, candidates)       until nothing is unfed (committed ids on a miss, at most the
                                        last draft on a hit)
    cache.grow_chain()                  backup jit, mode sync: one more draft, to be fed in turn
    cache.start_branches(fan_out)
    cache.add_branch_step(slots, candidates)    once per branch step, any number of them
A `take` may come at any point in between, after any number of steps or in a half-done prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from sglang_ssd.core.fan_out import fold_fan_out
from sglang_ssd.core.outcome_tree import IntArray, choose_branches, rotary_positions

OutcomeClass = Literal["hit", "chain_hit", "miss"]


class Taken(msgspec.Struct, frozen=True):
    """What an outcome leaves; the cache itself already stands at the next round."""

    kind: OutcomeClass
    """hit: the new ids end in a branch. chain_hit: they end on the chain (fewer drafts were
    verified than drafted). In both the bonus is fed and a draft is ready. miss: no draft is."""
    bonus_rank: int
    """Rank of the bonus among its position's guesses (0 on the chain and inside a branch), -1 if it
    was not guessed. A guess whose branch had no step yet has its rank and is a miss."""
    drafts: list[int]
    """d1 .. dm of the next round, m <= num_steps; [] on a miss."""
    relink_position: int
    relink_slots: IntArray
    """Branch slots that join the trunk: relink_slots[i] now is position relink_position + i."""
    trunk_len: int
    """Positions 0 .. trunk_len - 1 hold valid KV; what a table holds beyond is stale."""
    free_slots: IntArray
    """Slots to give back, each once."""
    unfed_tokens: list[int]
    """Tokens at positions trunk_len .. without KV: on a miss committed ids, the bonus last; on a
    hit at most the last draft."""


class _Branches:
    """The guesses of one round as columns; row i of every array is branch i."""

    __slots__ = ("positions", "ranks", "step_candidates", "step_slots", "tokens")

    def __init__(self, positions: IntArray, tokens: IntArray, ranks: IntArray) -> None:
        self.positions = positions  # [N]
        self.tokens = tokens  # [N] the guessed bonus c
        self.ranks = ranks  # [N]
        self.step_slots: list[IntArray] = []  # per step [N]
        self.step_candidates: list[IntArray] = []  # per step [N, C]

    def next_tokens(self) -> IntArray:  # [N]
        return self.step_candidates[-1][:, 0] if self.step_candidates else self.tokens

    def find(self, position: int, token: int) -> int | None:
        rows = np.flatnonzero((self.positions == position) & (self.tokens == token))
        return int(rows[0]) if rows.size else None

    def best(self, position: int) -> int | None:
        rows = np.flatnonzero((self.positions == position) & (self.ranks == 0))
        return int(rows[0]) if rows.size else None

    def line(self, row: int) -> list[int]:
        """c, e1 .. es after s steps."""
        return [int(self.tokens[row]), *(int(ranked[row, 0]) for ranked in self.step_candidates)]

    def slots(self, row: int) -> list[int]:
        return [int(slots[row]) for slots in self.step_slots]

    def candidates(self, row: int) -> list[IntArray]:
        return [ranked[row] for ranked in self.step_candidates]

    def slots_except(self, row: int | None) -> list[int]:
        if not self.step_slots:
            return []
        table = np.stack(self.step_slots, axis=1)  # [N, steps]
        kept = table if row is None else np.delete(table, row, axis=0)
        return [int(slot) for slot in kept.reshape(-1)]


_NO_BRANCHES = _Branches(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


class SpeculationCache:
    """See the module docstring. Not thread-safe; one per open sequence of the drafter."""

    __slots__ = ("_branches", "candidates", "committed_len", "num_steps", "slots", "tokens")

    def __init__(self, *, num_steps: int, committed_tokens: Sequence[int]) -> None:
        """A new sequence: nothing is fed yet, the last committed token stands for the bonus."""
        if not committed_tokens:
            raise ValueError("committed_tokens: got none, a sequence has at least one token")
        self.num_steps = num_steps
        self.tokens = list(committed_tokens)
        self.slots: list[int] = []
        self.committed_len = len(self.tokens)
        self.candidates: list[IntArray] = []  # per fed chain position: [C], best first
        self._branches = _NO_BRANCHES

    # What there is ------------------------------------------------------------------------------

    @property
    def drafts(self) -> list[int]:
        return self.tokens[self.committed_len :]

    @property
    def trunk_len(self) -> int:
        """Positions 0 .. trunk_len - 1 are fed."""
        return len(self.slots)

    @property
    def unfed_tokens(self) -> list[int]:
        """Tokens at positions trunk_len .. that have no KV yet."""
        return self.tokens[len(self.slots) :]

    @property
    def chain_len(self) -> int:
        """Bonus and drafts."""
        return len(self.tokens) - self.committed_len + 1

    @property
    def branch_positions(self) -> IntArray:  # [N]
        return self._branches.positions

    @property
    def num_branches(self) -> int:
        return len(self._branches.positions)

    @property
    def num_branch_steps(self) -> int:
        """Branch steps done."""
        return len(self._branches.step_slots)

    def branch_tokens(self) -> IntArray:  # [N]
        """What the next branch step feeds."""
        return self._branches.next_tokens()

    def branch_rotary_positions(self) -> IntArray:  # [N]
        """Rotary and noise positions of what the next branch step feeds."""
        return rotary_positions(
            self._branches.positions, committed_len=self.committed_len, step=self.num_branch_steps
        )

    def branch_step_slots(self) -> list[IntArray]:  # per step done: [N]
        """KV slots of the branches, for the attention plan; row i of each is branch i."""
        return self._branches.step_slots

    def all_slots(self) -> list[int]:
        """Every slot that this sequence holds."""
        return self.slots + self._branches.slots_except(None)

    # What a round adds --------------------------------------------------------------------------

    def feed(self, slots: Sequence[int] | IntArray, candidates: IntArray | None) -> None:
        """Slots for the next len(slots) unfed tokens; candidates [C] iff that feeds the whole line.

        A slice of a prefill passes None: only the last token's ranking is of use.
        """
        self.slots.extend(int(slot) for slot in slots)
        assert len(self.slots) <= len(self.tokens), "more slots than tokens"
        complete = len(self.slots) == len(self.tokens)
        assert complete == (candidates is not None), "candidates belong to the line's last token"
        if candidates is not None:
            self.candidates.append(candidates)

    def grow_chain(self) -> int:
        """Append the drafter's best next token as one more draft (unfed) and return it."""
        assert len(self.slots) == len(self.tokens), "a draft follows a fed token"
        assert len(self.drafts) < self.num_steps, "the chain already has num_steps drafts"
        token = int(self.candidates[-1][0])
        self.tokens.append(token)
        return token

    def start_branches(self, fan_out: Sequence[int]) -> None:
        """Guess outcomes of the round in flight: fan_out has num_steps + 1 counts.

        With fewer drafts the counts beyond go to the chain's last position, so a chain without
        drafts (first round, backup none) has all at position 0. Unfed positions get no guesses.
        """
        assert not self.num_branches, "one set of branches per round"
        counts = fold_fan_out(fan_out, num_drafts=len(self.drafts))
        self._branches = _Branches(*choose_branches(self.drafts, self.candidates, fan_out=counts))

    def add_branch_step(self, slots: IntArray, candidates: IntArray) -> None:
        """One forward over branch_tokens(): slots [N], candidates [N, C] best first."""
        assert slots.shape == (self.num_branches,), "one slot per branch"
        assert candidates.shape[0] == self.num_branches, "one ranking per branch"
        self._branches.step_slots.append(slots)
        self._branches.step_candidates.append(candidates)

    # What an outcome takes ----------------------------------------------------------------------

    def unseen_tokens(self, base_committed_len: int, tokens: Sequence[int]) -> list[int]:
        """Of a commit's ids, which start at base_committed_len, those not committed here yet.

        [] for a late or duplicate commit. ValueError if ids are missing or contradict known ones.
        """
        known = self.committed_len - base_committed_len
        if known < 0 or base_committed_len < 0:
            raise ValueError(
                f"base {base_committed_len}, but only {self.committed_len} ids are known"
            )
        overlap = self.tokens[base_committed_len : self.committed_len][: len(tokens)]
        if overlap != list(tokens[: len(overlap)]):
            raise ValueError(f"ids from {base_committed_len} contradict the committed ones")
        return list(tokens[known:])

    def take(self, new_tokens: Sequence[int]) -> Taken:
        """Walk the true ids after the committed ones: d1 .. dk, bonus; more after lost commits.

        The longest match joins the line, the rest of chain and branches is freed, what has no KV is
        unfed. A chain hit goes on into the best branch of the chain's last position.
        """
        assert new_tokens, "an outcome has at least the bonus"
        on_chain = _common_len(self.drafts, new_tokens)
        ends_on_chain = on_chain == len(new_tokens)
        fork = len(self.drafts) if ends_on_chain else on_chain
        if ends_on_chain:
            row = self._branches.best(fork)
        else:
            row = self._branches.find(fork, new_tokens[fork])
        guessed_rank = -1 if row is None else int(self._branches.ranks[row])

        relink_position = self.committed_len + fork
        freed = self._adopt_branch(row, fork=fork)
        num_walked = _common_len(self.drafts, new_tokens)
        freed += self._commit(new_tokens, num_walked=num_walked)
        ended: OutcomeClass = "chain_hit" if ends_on_chain else "hit"
        if ends_on_chain or num_walked > fork + 1:
            guessed_rank = 0
        return Taken(
            kind=ended if self.drafts else "miss",
            bonus_rank=guessed_rank if num_walked == len(new_tokens) else -1,
            drafts=self.drafts,
            relink_position=relink_position,
            relink_slots=np.array(self.slots[relink_position:], dtype=np.int64),
            trunk_len=self.trunk_len,
            free_slots=np.array(freed, dtype=np.int64),
            unfed_tokens=self.unfed_tokens,
        )

    def _adopt_branch(self, row: int | None, *, fork: int) -> list[int]:
        """Make drafts[:fork] and branch `row` the one line; returns the slots of all else."""
        branches, self._branches = self._branches, _NO_BRANCHES
        freed = branches.slots_except(row) + self._cut(self.committed_len + fork)
        if row is not None:
            self.tokens.extend(branches.line(row))
            self.slots.extend(branches.slots(row))
            self.candidates.extend(branches.candidates(row))
        return freed

    def _commit(self, new_tokens: Sequence[int], *, num_walked: int) -> list[int]:
        """Commit ids of which the line has the first num_walked; returns the slots that left it."""
        freed: list[int] = []
        if num_walked < len(new_tokens):
            freed += self._cut(self.committed_len + num_walked)
            self.tokens.extend(new_tokens[num_walked:])
        self.committed_len += len(new_tokens)
        del self.candidates[: len(new_tokens)]
        freed += self._cut(self.committed_len + self.num_steps)
        if self.candidates and not self.unfed_tokens and len(self.drafts) < self.num_steps:
            self.grow_chain()
        return freed

    def _cut(self, line_len: int) -> list[int]:
        """Forget the line from position line_len on; returns the slots that left it."""
        freed = self.slots[line_len:]
        del self.tokens[line_len:], self.slots[line_len:]
        del self.candidates[max(0, line_len - self.committed_len + 1) :]
        return freed

    def release(self) -> IntArray:
        """Give every slot back; the sequence is over."""
        slots = np.array(self.all_slots(), dtype=np.int64)
        self.slots, self.candidates = [], []
        self._branches = _NO_BRANCHES
        return slots


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
