"""The walk of an outcome through chain and branches, by example and against a dictionary."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch

from sglang_ssd.core.outcome_tree import tree_mask
from sglang_ssd.core.speculation_cache import SpeculationCache, Taken
from toys.tree import guesses, ids_through_next_pass

NUM_CANDIDATES = 8


def ranked(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


class Pool:
    """KV storage as what it holds: the ids whose KV each slot is."""

    def __init__(self, size: int) -> None:
        self.free = list(range(size))
        self.size = size

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the pool is too small for the test"
        return taken

    def give_back(self, slots: np.ndarray) -> None:
        self.free.extend(slots.tolist())

    def check_partition(self, cache: SpeculationCache) -> None:
        assert sorted(self.free + cache.all_slots()) == list(range(self.size))


class Drafter:
    """A cache with a pool and a rule that ranks the next token of any ids."""

    def __init__(self, rule, *, num_steps: int, fan_out: list[int], prompt: list[int]) -> None:
        self.rule = rule
        self.fan_out = fan_out
        self.pool = Pool(4096)
        self.content: dict[int, tuple[int, ...]] = {}
        self.cache = SpeculationCache(num_steps=num_steps, committed_tokens=prompt)
        self.table: dict[int, int] = {}  # position -> slot, kept as an owner keeps its row

    def write(self, slots: list[int], ends: list[tuple[int, ...]]) -> None:
        self.content.update(zip(slots, ends, strict=True))

    def feed(self, count: int | None = None) -> None:
        cache = self.cache
        count = len(cache.unfed_tokens) if count is None else count
        slots, start = self.pool.take(count), cache.trunk_len
        self.write(slots, [tuple(cache.tokens[: start + i + 1]) for i in range(count)])
        self.table.update({start + i: slot for i, slot in enumerate(slots)})
        complete = start + count == len(cache.tokens)
        cache.feed(slots, self.rule(tuple(cache.tokens)) if complete else None)

    def jit(self, num_drafts: int) -> None:
        """As many drafts; the last stays unfed."""
        for _ in range(num_drafts):
            self.feed()
            self.cache.grow_chain()

    def branch(self, num_passes: int) -> None:
        self.cache.start_branches(self.fan_out)
        for _ in range(num_passes):
            if not self.cache.is_built:
                self.make_pass()

    def make_pass(self) -> None:
        cache, made = self.cache, self.cache.next_pass()
        ends = ids_through_next_pass(cache)
        assert made.tokens.tolist() == [end[-1] for end in ends]
        assert made.positions.tolist() == [len(end) - 1 for end in ends]
        slots, start = self.pool.take(len(ends)), cache.trunk_len
        self.write(slots, ends)
        chain = cache.slots[cache.committed_len - 1 :]
        columns = [*chain, *(slot for step in made.earlier_slots for slot in step), *slots]
        mask = tree_mask(made.cohorts, chain_len=len(chain))
        for end, visible in zip(ends, mask, strict=True):
            seen = [self.content[columns[i]] for i in torch.nonzero(visible)[:, 0].tolist()]
            assert sorted(seen, key=len) == [
                end[:length] for length in range(cache.committed_len, len(end) + 1)
            ], "a row sees its own text, each place once"
        shape = (len(ends), NUM_CANDIDATES)
        rows = np.reshape([self.rule(end) for end in ends], shape)
        cache.add_pass(np.array(slots, dtype=np.int64), rows)
        self.table.update(enumerate(cache.slots[start:], start))

    def take(self, new_tokens: list[int]) -> Taken:
        held = self.cache.all_slots()
        taken = self.cache.take(new_tokens)
        self.pool.give_back(taken.free_slots)
        assert set(taken.free_slots.tolist()) <= set(held), "frees a slot that it did not hold"
        for i, slot in enumerate(taken.relink_slots.tolist()):
            self.table[taken.relink_position + i] = slot
        self.check()
        return taken

    def check(self) -> None:
        """KV is right, every slot is in one place, the owner's table mirrors the line."""
        cache = self.cache
        for position, slot in enumerate(cache.slots):
            assert self.content[slot] == tuple(cache.tokens[: position + 1]), "KV of other ids"
            assert self.table[position] == slot, "the owner's table misses a re-link"
        self.pool.check_partition(cache)
        assert len(cache.candidates) == max(0, cache.trunk_len - cache.committed_len + 1)


def count_up(ids: tuple[int, ...]) -> np.ndarray:
    """Next token = last + 1, then last + 2 ..: drafts are runs, guesses are skips."""
    return np.arange(ids[-1] + 1, ids[-1] + 1 + NUM_CANDIDATES, dtype=np.int64)


def drafter(num_steps: int = 3, fan_out: list[int] | None = None) -> Drafter:
    counts = fan_out or [2] * (num_steps + 1)
    made = Drafter(count_up, num_steps=num_steps, fan_out=counts, prompt=[10, 20, 30])
    made.feed()
    return made


def in_flight(num_passes: int = 4, **settings) -> Drafter:
    """Bonus 40 at position 3 with chain 41 42 43 (jit, 43 unfed), and its branches."""
    made = drafter(**settings)
    made.take([40])
    made.jit(3)
    made.branch(num_passes)
    return made


# The passes of a tree --------------------------------------------------------------------------


def passes_of(one: Drafter) -> list[int]:
    """Rows of each pass until the tree is built."""
    one.cache.start_branches(one.fan_out)
    rows = []
    while not one.cache.is_built:
        rows.append(len(one.cache.next_pass().tokens))
        one.make_pass()
    return rows


@pytest.mark.parametrize(
    ("fan_out", "expected"),
    [
        ([2, 2, 2, 2], [7, 8, 8, 2]),  # N * K + 1 rows in K + 1 passes
        ([3, 0, 1, 0], [5, 4, 4]),  # nothing to guess after d3; it is fed all the same
        ([0, 0, 0, 4], [1, 4, 4, 4]),  # nothing to guess before
    ],
)
def test_the_last_draft_is_fed_beside_the_branches_that_do_not_wait_for_it(fan_out, expected):
    one = in_flight_chain(fan_out)
    assert passes_of(one) == expected
    assert one.cache.unfed_tokens == []
    assert {len(guess.slots) for guess in guesses(one.cache)} == {3}
    assert [guess.position for guess in guesses(one.cache)] == [
        position for position, count in enumerate(fan_out) for _ in range(count)
    ]


def test_a_chain_that_is_fed_to_its_end_takes_a_pass_less():
    one = in_flight_chain([2, 2, 2, 2])
    one.feed()
    assert passes_of(one) == [8, 8, 8]


def test_a_short_chain_has_the_remaining_guesses_at_its_end():
    one = in_flight_chain([2, 1, 1, 1], num_drafts=1)
    assert passes_of(one) == [3, 5, 5, 3]  # two at position 0, three after d1
    assert [guess.position for guess in guesses(one.cache)] == [0, 0, 1, 1, 1]


def test_without_a_chain_all_guesses_are_of_the_next_token():
    assert passes_of(drafter(fan_out=[2, 1, 1, 1])) == [5, 5, 5]


def test_with_one_step_the_last_position_follows_in_a_pass_of_its_own():
    one = Drafter(count_up, num_steps=1, fan_out=[2, 3], prompt=[10])
    one.jit(1)
    assert passes_of(one) == [3, 3]


def in_flight_chain(fan_out: list[int], num_drafts: int = 3) -> Drafter:
    """The bonus 40 and its drafts, the last of them unfed."""
    one = drafter(fan_out=fan_out)
    one.take([40])
    one.jit(num_drafts)
    return one


# The table of what stays valid and what must be fed --------------------------------------------


@pytest.mark.parametrize("num_correct", [0, 1, 2, 3])
def test_hit_leaves_the_last_draft_to_feed_and_all_drafts_ready(num_correct):
    one = in_flight()
    chain = [41, 42, 43]
    bonus = [40, 41, 42, 43][num_correct] + (2 if num_correct < 3 else 1)  # the best guess there
    taken = one.take([*chain[:num_correct], bonus])
    assert (taken.kind, taken.bonus_rank) == ("hit", 0)
    assert taken.drafts == [bonus + 1, bonus + 2, bonus + 3]
    assert taken.unfed_tokens == [bonus + 3]
    assert taken.trunk_len == 3 + num_correct + 1 + 3  # .. P' + K - 1: prefix, chain, c e1 e2
    assert len(taken.relink_slots) == 3
    assert taken.relink_position == 4 + num_correct


def test_second_guess_has_rank_one():
    taken = in_flight().take([41, 44])
    assert (taken.kind, taken.bonus_rank, taken.drafts) == ("hit", 1, [45, 46, 47])


@pytest.mark.parametrize("num_correct", [0, 1, 2, 3])
def test_miss_keeps_the_right_chain_and_feeds_the_bonus(num_correct):
    taken = in_flight().take([*[41, 42, 43][:num_correct], 99])
    assert (taken.kind, taken.bonus_rank, taken.drafts) == ("miss", -1, [])
    assert taken.unfed_tokens == [99]
    assert taken.trunk_len == 4 + num_correct
    assert taken.relink_slots.size == 0


def test_all_accepted_with_the_last_draft_unfed_feeds_it_too():
    """Mode sync has no tree that feeds d_K, so two tokens follow after an all-accepted round."""
    one = drafter()
    one.take([40])
    one.jit(3)
    taken = one.take([41, 42, 43, 99])
    assert (taken.kind, taken.unfed_tokens) == ("miss", [43, 99])
    assert taken.trunk_len == 6


def test_miss_under_backup_none_guesses_everything_at_position_0():
    one = in_flight()
    one.take([99])
    one.feed()
    one.branch(4)
    assert [guess.position for guess in guesses(one.cache)] == [0] * 8
    assert [guess.line for guess in guesses(one.cache)] == [
        [c, c + 1, c + 2, c + 3] for c in range(100, 108)
    ]
    taken = one.take([100])  # what a chain would have drafted is a guess here
    assert (taken.kind, taken.bonus_rank, taken.drafts) == ("hit", 0, [101, 102, 103])


def test_first_token_after_prefill_can_be_a_hit():
    one = drafter()
    one.branch(4)
    taken = one.take([33])
    assert (taken.kind, taken.bonus_rank, taken.drafts) == ("hit", 2, [34, 35, 36])


# The chain hit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_verified", [0, 1, 2])
def test_chain_hit_goes_on_into_the_best_branch_of_the_last_position(num_verified):
    """The target looked at fewer drafts than the chain has and then chose the chain's own next."""
    one = in_flight()
    taken = one.take([41, 42, 43][: num_verified + 1])
    assert (taken.kind, taken.bonus_rank) == ("chain_hit", 0)
    assert taken.drafts == [42 + num_verified, 43 + num_verified, 44 + num_verified]
    assert taken.unfed_tokens == []
    assert taken.trunk_len == 4 + num_verified + 4


@pytest.mark.parametrize(("num_passes", "drafts"), [(0, [43]), (1, [43, 44]), (4, [43, 44])])
def test_chain_hit_without_branches_goes_as_far_as_the_chain_is_ranked(num_passes, drafts):
    one = in_flight(num_passes, fan_out=[2, 2, 2, 0])
    taken = one.take([41, 42])
    assert (taken.kind, taken.drafts) == ("chain_hit", drafts)
    assert taken.unfed_tokens == drafts[-1:]


@pytest.mark.parametrize(
    ("num_passes", "drafts"), [(0, [43]), (1, [43, 44]), (2, [43, 44, 45]), (4, [43, 44, 45])]
)
def test_chain_hit_takes_what_there_is_of_the_best_last_branch(num_passes, drafts):
    taken = in_flight(num_passes).take([41, 42])
    assert (taken.kind, taken.drafts) == ("chain_hit", drafts)
    assert taken.unfed_tokens == (drafts[-1:] if num_passes < 4 else [])


def test_chain_hit_on_an_unfed_last_draft_is_a_miss():
    one = drafter()
    one.take([40])
    one.jit(3)
    taken = one.take([41, 42, 43])
    assert (taken.kind, taken.unfed_tokens) == ("miss", [43])


# Rounds that are cut short, lost or late -------------------------------------------------------


@pytest.mark.parametrize("num_passes", [1, 2, 3, 4])
def test_partly_built_branches_give_as_many_drafts_as_steps(num_passes):
    """Those of the last position are one step behind the others."""
    taken = in_flight(num_passes).take([41, 43])
    assert (taken.kind, taken.bonus_rank) == ("hit", 0)
    assert taken.drafts == [44, 45, 46][:num_passes]
    assert taken.unfed_tokens == taken.drafts[-1:]
    taken = in_flight(num_passes).take([41, 42, 43, 45])
    assert taken.bonus_rank == 1
    assert taken.drafts == [46, 47, 48][: num_passes - 1]
    assert taken.kind == ("hit" if num_passes > 1 else "miss")
    assert taken.unfed_tokens == (taken.drafts[-1:] or [45])


def test_a_guess_without_a_step_is_a_miss_of_known_rank():
    taken = in_flight(0).take([41, 43])
    assert (taken.kind, taken.bonus_rank, taken.unfed_tokens) == ("miss", 0, [43])


def test_there_is_no_guess_after_a_draft_that_is_not_fed():
    taken = in_flight(0).take([41, 42, 43, 44])
    assert (taken.kind, taken.bonus_rank, taken.unfed_tokens) == ("miss", -1, [43, 44])


def test_a_lost_commit_is_walked_as_far_as_it_was_guessed():
    inside = in_flight().take([41, 44, 45, 46])  # branch (1, 44), of rank 1, and its drafts 45 46
    assert (inside.kind, inside.bonus_rank, inside.drafts) == ("hit", 0, [47])
    left = in_flight().take([41, 43, 44, 99, 100])
    assert (left.kind, left.unfed_tokens, left.trunk_len) == ("miss", [99, 100], 7)
    beyond = in_flight().take([41, 43, 44, 45, 46, 47, 48])
    assert (beyond.kind, beyond.unfed_tokens) == ("miss", [46, 47, 48])


def test_outcome_in_the_middle_of_a_sliced_prefill():
    one = Drafter(count_up, num_steps=2, fan_out=[2, 2, 2], prompt=list(range(100, 110)))
    one.feed(4)
    taken = one.take([7, 8])
    assert (taken.kind, taken.trunk_len) == ("miss", 4)
    assert taken.unfed_tokens == [*range(104, 110), 7, 8]
    one.feed(3)
    one.feed()
    assert one.cache.candidates[0].tolist() == count_up((8,)).tolist()


def test_late_and_duplicate_commits_are_nothing_new():
    cache = in_flight().cache  # committed: 10 20 30 40
    assert cache.unseen_tokens(3, [40]) == []
    assert cache.unseen_tokens(2, [30]) == []
    assert cache.unseen_tokens(2, [30, 40, 41, 99]) == [41, 99]
    assert cache.unseen_tokens(4, [41]) == [41]


def test_a_commit_beyond_what_is_known_is_refused():
    with pytest.raises(ValueError, match=r"only 4 ids"):
        in_flight().cache.unseen_tokens(5, [1])


@pytest.mark.parametrize(
    ("base", "tokens", "position"),
    [(2, [30, 40], None), (2, [30, 99], 3), (1, [5], 1), (4, [7], None), (2, [30, 41, 1], 3)],
)
def test_the_first_id_that_contradicts_is_found(base, tokens, position):
    assert in_flight().cache.contradicted_at(base, tokens) == position  # committed: 10 20 30 40


def test_a_rewind_keeps_the_prefix_and_unfeeds_its_last_token():
    one = in_flight()
    before = one.cache.all_slots()
    kept = one.cache.slots[:1]
    freed = one.cache.rewind(2)
    assert (one.cache.tokens, one.cache.committed_len, one.cache.slots) == ([10, 20], 2, kept)
    assert sorted([*freed, *kept]) == sorted(before)
    assert one.cache.unfed_tokens == [20]
    assert not one.cache.has_tree


def test_release_gives_back_every_slot():
    one = in_flight()
    one.pool.give_back(one.cache.release())
    assert sorted(one.pool.free) == list(range(one.pool.size))


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        SpeculationCache(num_steps=1, committed_tokens=[])


# Against a dictionary of everything that is fed ------------------------------------------------


@functools.cache
def arbitrary(ids: tuple[int, ...]) -> np.ndarray:
    """A fixed ranking of 12 tokens that depends on all ids."""
    return np.array(random.Random(hash(ids)).sample(range(12), NUM_CANDIDATES), dtype=np.int64)


def all_fed(one: Drafter) -> set[tuple[int, ...]]:
    return {one.content[slot] for slot in one.cache.all_slots()}


def best_line(ids: tuple[int, ...], fed: set[tuple[int, ...]], num_steps: int) -> list[int]:
    """Drafts that follow from rankings already known."""
    drafts: list[int] = []
    while len(drafts) < num_steps and ids in fed:
        drafts.append(int(arbitrary(ids)[0]))
        ids = (*ids, drafts[-1])
    return drafts


def true_continuation(rng: random.Random, ids: tuple[int, ...], count: int) -> list[int]:
    """Mostly what the drafter ranks first, else another of its candidates, now and then neither."""
    start = len(ids)
    for _ in range(count):
        rank = 0 if rng.random() < 0.7 else rng.randrange(NUM_CANDIDATES)
        token = int(arbitrary(ids)[rank]) if rng.random() < 0.95 else rng.randrange(12)
        ids = (*ids, token)
    return list(ids[start:])


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_random_rounds_agree_with_a_dictionary_of_prefixes(num_steps, seed):
    rng = random.Random(100 * num_steps + seed)
    fan_out = [rng.randrange(3) for _ in range(num_steps)] + [2]
    prompt = [rng.randrange(12) for _ in range(5)]
    one = Drafter(arbitrary, num_steps=num_steps, fan_out=fan_out, prompt=prompt)
    kinds: dict[str, int] = {"hit": 0, "chain_hit": 0, "miss": 0}
    for _ in range(60):
        draft_as_a_drafter_might(one, rng)
        fed, old_line = all_fed(one), tuple(one.cache.tokens)
        committed = tuple(one.cache.tokens[: one.cache.committed_len])
        count = rng.randint(1, num_steps + 1) if rng.random() < 0.9 else rng.randint(1, 12)
        new = true_continuation(rng, committed, count)
        taken = one.take(new)

        ids = (*committed, *new)
        drafts = best_line(ids, fed, num_steps)
        assert taken.drafts == drafts
        line = (*ids, *drafts)
        longest = max(n for n in range(len(line) + 1) if n == 0 or line[:n] in fed)
        assert taken.trunk_len == longest
        assert list(line[longest:]) == taken.unfed_tokens
        on_chain = old_line[: len(ids)] == ids
        expected = ("chain_hit" if on_chain else "hit") if drafts else "miss"
        assert taken.kind == expected
        assert one.cache.committed_len == len(ids)
        kinds[taken.kind] += 1
    assert min(kinds.values()) >= 1, f"the test lost its point: {kinds}"


def draft_as_a_drafter_might(one: Drafter, rng: random.Random) -> None:
    """Catch up, draft and branch; often only in part."""
    cache = one.cache
    num_unfed = len(cache.unfed_tokens)
    if num_unfed > 1 and rng.random() < 0.15:
        one.feed(rng.randrange(num_unfed))
        return
    if cache.trunk_len < cache.committed_len or rng.random() < 0.5:
        one.feed()
    while not cache.unfed_tokens and len(cache.drafts) < cache.num_steps and rng.random() < 0.8:
        cache.grow_chain()
        if rng.random() < 0.7:
            one.feed()
    if rng.random() < 0.9:
        one.branch(rng.randint(0, cache.num_steps + 1))
