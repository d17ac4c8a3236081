"""One request's tokens, KV slots and guesses on the drafter, and an outcome's walk through them.

    position   0 ..........  P   P+1 .. P+m     P = committed_len - 1, m <= num_steps
    tokens     committed ids b   d1  .. dm      b is the bonus (or the last prompt token)
    slots      s0 s1 ....... sP  ..             slots of a prefix of tokens: that part is "fed"
    candidates               C0  C1  .. Cm      C_j: the drafter's best tokens after position j of
                                                the chain, there iff it is fed; d_{j+1} is C_j[0]
    branch (j, c)            c e1 .. eK         step s feeds c (s = 0) or e_s: one slot and ranking
                                                per branch and step; its best is e_{s+1}

Invariant: slot i holds the KV of tokens[0..i], and tokens[:committed_len] are the target's own. Of
the drafts at most the last is unfed. Every slot handed in is in exactly one place (the line or one
branch) until `take` or `release` gives it back. Pure state: no device, no allocator, no SGLang. The
owner copies `Taken.relink_slots` into its table.

What an outcome leaves, its bonus now at position P:
    hit         0 .. P+K-1 fed; the last draft is fed by the next tree's first pass
    chain hit   the same, or 0 .. P+K if all drafts come from what was fed: nothing to feed then
    miss        0 .. P-1 fed at most; the rest through the bonus is fed before anything else

How a round uses it, in order:
    cache.take(new_tokens)              outcome in; on a hit the drafts are ready: reply
    cache.feed(slots, candidates)       until the bonus is fed (it is on a hit)
    cache.grow_chain()                  backup jit, mode sync: one more draft, to be fed in turn
    cache.start_branches(fan_out)       once the chain is whole; its last draft may be unfed
    cache.next_pass()                   rows of one forward (drawn in outcome_tree.py) ..
    cache.add_pass(slots, candidates)   .. and what came out, until is_built
A `take` may come at any point in between, after any number of passes or in a half-done prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from sglang_ssd.core.fan_out import fold_fan_out
from sglang_ssd.core.outcome_tree import Cohort, IntArray, choose_branches, rotary_positions

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


class TreePass(msgspec.Struct, frozen=True):
    """Rows of one forward: the chain's unfed draft, if there is one, then a step of each branch."""

    cohorts: tuple[Cohort, ...]
    """The unfed draft is the first of them, with one row."""
    tokens: IntArray  # [R]
    positions: IntArray  # [R] rotary and noise positions
    earlier_slots: list[IntArray]
    """KV slots of the rows' earlier steps: cohort by cohort, step by step."""


class _Branch(msgspec.Struct, frozen=True):
    """One guess, and what its steps have made of it."""

    rank: int
    line: list[int]  # c, e1 .. es after s steps
    slots: list[int]  # of c .. e_{s-1}
    candidates: list[IntArray]  # after each of these


_NOT_GUESSED = _Branch(rank=-1, line=[], slots=[], candidates=[])


class _Branches:
    """A cohort as columns; row i of every array is branch i."""

    __slots__ = ("positions", "ranks", "step_candidates", "step_slots", "tokens")

    def __init__(self, positions: IntArray, tokens: IntArray, ranks: IntArray) -> None:
        self.positions = positions  # [N]
        self.tokens = tokens  # [N] the guessed bonus c
        self.ranks = ranks  # [N]
        self.step_slots: list[IntArray] = []  # per step [N]
        self.step_candidates: list[IntArray] = []  # per step [N, C]

    def __len__(self) -> int:
        return len(self.tokens)

    def signature(self) -> Cohort:
        return Cohort(tuple(self.positions.tolist()), self.num_steps_fed)

    @property
    def num_steps_fed(self) -> int:
        return len(self.step_slots)

    def next_positions(self, committed_len: int) -> IntArray:  # [N]
        return rotary_positions(
            self.positions, committed_len=committed_len, step=self.num_steps_fed
        )

    def next_tokens(self) -> IntArray:  # [N]
        return self.step_candidates[-1][:, 0] if self.step_candidates else self.tokens

    def add_step(self, slots: IntArray, candidates: IntArray) -> None:
        self.step_slots.append(slots)
        self.step_candidates.append(candidates)

    def find(self, position: int, token: int | None) -> int | None:
        """The row of a guess; token None: of the best one at this position."""
        is_it = self.ranks == 0 if token is None else self.tokens == token
        rows = np.flatnonzero((self.positions == position) & is_it)
        return int(rows[0]) if rows.size else None

    def branch(self, row: int) -> _Branch:
        return _Branch(
            rank=int(self.ranks[row]),
            line=[int(self.tokens[row]), *(int(ranked[row, 0]) for ranked in self.step_candidates)],
            slots=[int(slots[row]) for slots in self.step_slots],
            candidates=[ranked[row] for ranked in self.step_candidates],
        )


class SpeculationCache:
    """See the module docstring. Not thread-safe; one per open sequence of the drafter."""

    __slots__ = (
        "_cohorts",
        "_unguessed",
        "candidates",
        "committed_len",
        "num_steps",
        "slots",
        "tokens",
    )

    def __init__(self, *, num_steps: int, committed_tokens: Sequence[int]) -> None:
        """A new sequence: nothing is fed yet, the last committed token stands for the bonus."""
        if not committed_tokens:
            raise ValueError("committed_tokens: got none, a sequence has at least one token")
        self.num_steps = num_steps
        self.tokens = list(committed_tokens)
        self.slots: list[int] = []
        self.committed_len = len(self.tokens)
        self.candidates: list[IntArray] = []  # per fed chain position: [C], best first
        self._cohorts: list[_Branches] = []
        self._unguessed: list[int] = []  # per chain position: guesses yet to be made; [] before

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
    def has_tree(self) -> bool:
        """Whether start_branches was called in this round."""
        return bool(self._unguessed)

    @property
    def is_built(self) -> bool:
        """Whether the round's tree is complete: no pass is left."""
        return self.has_tree and not self._next_cohorts()

    def all_slots(self) -> list[int]:
        """Every slot that this sequence holds."""
        return self.slots + self._branch_slots()

    def _branch_slots(self) -> list[int]:
        steps = [slots for cohort in self._cohorts for slots in cohort.step_slots]
        return [int(slot) for slots in steps for slot in slots]

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
        assert not self.has_tree, "guesses are made on a chain that is whole"
        token = int(self.candidates[-1][0])
        self.tokens.append(token)
        return token

    def start_branches(self, fan_out: Sequence[int]) -> None:
        """Guess outcomes of the round in flight: fan_out has num_steps + 1 counts.

        With fewer drafts the counts beyond go to the chain's last position, so a chain without
        drafts (first round, backup none) has all at position 0. While the last draft is unfed its
        position has no guesses; it gets them from the pass that feeds it.
        """
        assert not self.has_tree, "one tree per round"
        assert self.trunk_len >= self.committed_len, "guesses follow a fed bonus"
        self._unguessed = fold_fan_out(fan_out, num_drafts=len(self.drafts))
        self._guess()

    def next_pass(self) -> TreePass:
        """Rows of the next forward of a tree that is not built yet."""
        cohorts = self._next_cohorts()
        return TreePass(
            cohorts=tuple(one.signature() for one in cohorts),
            tokens=np.concatenate([one.next_tokens() for one in cohorts]),
            positions=np.concatenate([one.next_positions(self.committed_len) for one in cohorts]),
            earlier_slots=[slots for one in cohorts for slots in one.step_slots],
        )

    def pass_runs(self) -> list[list[int]]:
        """Per row of next_pass() the tokens behind the bonus up to the one it feeds."""
        return [
            self.drafts[: one.positions[row]] + one.branch(row).line
            for one in self._next_cohorts()
            for row in range(len(one))
        ]

    def add_pass(self, slots: IntArray, candidates: IntArray) -> None:
        """The forward of next_pass(): slots [R], candidates [R, C] best first."""
        cohorts = self._next_cohorts()
        ends = np.cumsum([len(one) for one in cohorts])
        assert len(slots) == len(candidates) == ends[-1], "one slot and one ranking per row"
        shares = zip(np.split(slots, ends[:-1]), np.split(candidates, ends[:-1]), strict=True)
        for one, (step_slots, step_candidates) in zip(cohorts, shares, strict=True):
            one.add_step(step_slots, step_candidates)
        if self.unfed_tokens:
            fed = cohorts[0].branch(0)
            self.feed(fed.slots, fed.candidates[0])
            self._guess()

    def _next_cohorts(self) -> list[_Branches]:
        """What the next pass steps; the unfed draft d_m is the branch (m - 1, d_m)."""
        chain = [_single(len(self.drafts) - 1, token) for token in self.unfed_tokens]
        return chain + [one for one in self._cohorts if one.num_steps_fed < self.num_steps]

    def _guess(self) -> None:
        """Start the branches of the fed positions that have none yet."""
        columns = choose_branches(self.drafts, self.candidates, fan_out=self._unguessed)
        if len(columns[0]):
            self._cohorts.append(_Branches(*columns))
        num_fed = len(self.candidates)
        self._unguessed[:num_fed] = [0] * num_fed

    # What an outcome takes ----------------------------------------------------------------------

    def unseen_tokens(self, base_committed_len: int, tokens: Sequence[int]) -> list[int]:
        """Of a commit's ids, which start at base_committed_len, those not committed here yet.

        [] for a late or duplicate commit. They must not contradict known ones (`contradicted_at`).
        ValueError if ids between are missing.
        """
        known = self.committed_len - base_committed_len
        if known < 0:
            raise ValueError(
                f"base {base_committed_len}, but only {self.committed_len} ids are known"
            )
        return list(tokens[known:])

    def contradicted_at(self, base_committed_len: int, tokens: Sequence[int]) -> int | None:
        """Position of the first of a commit's ids that is not what is committed there."""
        overlap = self.tokens[base_committed_len : self.committed_len]
        agreed = _common_len(overlap, tokens)
        is_contradicted = agreed < min(len(overlap), len(tokens))
        return base_committed_len + agreed if is_contradicted else None

    def rewind(self, committed_len: int) -> IntArray:
        """Uncommit what follows the first committed_len ids; returns the slots that left.

        The last id that stays is unfed: what the drafter says after it has to be asked anew.
        """
        assert 1 <= committed_len <= self.committed_len, "a sequence has at least one token"
        freed = self._branch_slots() + self.slots[committed_len - 1 :]
        self._cohorts, self._unguessed, self.candidates = [], [], []
        del self.tokens[committed_len:], self.slots[committed_len - 1 :]
        self.committed_len = committed_len
        return np.array(freed, dtype=np.int64)

    def take(self, new_tokens: Sequence[int]) -> Taken:
        """Walk the true ids after the committed ones: d1 .. dk, bonus; more after lost commits.

        The longest match joins the line, the rest of chain and branches is freed, what has no KV is
        unfed. A chain hit goes on into the best branch of the chain's last position.
        """
        assert new_tokens, "an outcome has at least the bonus"
        on_chain = _common_len(self.drafts, new_tokens)
        ends_on_chain = on_chain == len(new_tokens)
        fork = len(self.drafts) if ends_on_chain else on_chain
        branch = self._find(fork, None if ends_on_chain else new_tokens[fork])
        guessed_rank = branch.rank

        relink_position = self.committed_len + fork
        freed = self._adopt(branch, fork=fork)
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

    def _find(self, position: int, token: int | None) -> _Branch:
        """The branch of a guess; token None: of the best one at this position."""
        for cohort in self._cohorts:
            row = cohort.find(position, token)
            if row is not None:
                return cohort.branch(row)
        return _NOT_GUESSED

    def _adopt(self, branch: _Branch, *, fork: int) -> list[int]:
        """Make drafts[:fork] and the branch the one line; returns the slots of all else."""
        kept = set(branch.slots)
        freed = [slot for slot in self._branch_slots() if slot not in kept]
        self._cohorts, self._unguessed = [], []
        freed += self._cut(self.committed_len + fork)
        self.tokens.extend(branch.line)
        self.slots.extend(branch.slots)
        self.candidates.extend(branch.candidates)
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
        self._cohorts, self._unguessed = [], []
        return slots


def _single(position: int, token: int) -> _Branches:
    """A cohort of one guess."""
    return _Branches(*(np.array([value], dtype=np.int64) for value in (position, token, 0)))


def _common_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
