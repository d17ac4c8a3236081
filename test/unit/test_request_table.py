"""Who holds which slot, and what is refused when there are none."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_ssd.drafter.request_table import DraftedSequence, Limits, RequestTable
from sglang_ssd.wire.messages import DraftRule

LIMITS = Limits(num_steps=2, fan_out=[2, 1, 1], context_len=40, vocab_size=50)


def table(total_slots: int = 100, max_sequences: int = 3) -> RequestTable:
    return RequestTable(total_slots=total_slots, max_sequences=max_sequences, context_len=40)


def opened(where: RequestTable, rid: str, length: int, generation: int = 1) -> DraftedSequence:
    seq = DraftedSequence(
        peer=b"p", rid=rid, generation=generation, rule=DraftRule(), limits=LIMITS, now=0.0
    )
    where.open(seq, list(range(length)))
    return seq


def feed(where: RequestTable, seq: DraftedSequence) -> None:
    count = seq.num_unfed
    slots = where.slots_for(count)
    seq.line_slots[:count] = slots
    seq.cache.feed(slots, np.arange(5))


def test_limits_count_the_deepest_branch() -> None:
    """4 branches of 2 steps; e_1 of a branch after both drafts stands at committed_len + 3."""
    assert LIMITS.branch_slots == 8
    assert LIMITS.most_slots(10) == 10 + 2 + 8
    assert LIMITS.max_committed_len + 3 == 39
    assert LIMITS.line_width == 4
    assert LIMITS.branch_width == 3


def test_sync_limits_have_no_branches() -> None:
    limits = Limits(num_steps=2, fan_out=[], context_len=40, vocab_size=50)
    assert limits.most_slots(10) == 12
    assert limits.max_committed_len + 2 == 39
    assert limits.line_width == limits.branch_width == 1


def test_a_sequence_that_could_outgrow_the_pool_is_refused_at_the_door() -> None:
    where = table(total_slots=50)
    first = opened(where, "a", 10)
    second = opened(where, "b", 21)
    assert first.refused is None
    assert second.refused == "full"
    assert where.num_live == 1
    where.close(first)
    assert opened(where, "c", 21).refused is None
    where.check_partition()


def test_the_table_is_bounded_by_rows_as_well() -> None:
    where = table(total_slots=1000, max_sequences=2)
    assert [opened(where, rid, 5).refused for rid in "abc"] == [None, None, "full"]


def test_names_of_refused_sequences_are_bounded() -> None:
    where = table(total_slots=10, max_sequences=2)
    for i in range(100):
        opened(where, f"r{i}", 20)
    assert sum(where.find(b"p", f"r{i}") is not None for i in range(100)) == 16


def test_refused_names_keep_out_none_that_fits() -> None:
    """Red when one target's prompts beyond the context leave no room for another's."""
    where = table(max_sequences=2)
    for i in range(100):
        opened(where, f"r{i}", 40)
    seq = opened(where, "a", 5)
    assert seq.refused is None
    assert where.find(b"p", "a") is seq
    where.check_partition()


def test_names_of_sequences_that_grew_too_large_are_bounded() -> None:
    """Red when each that is let in and refused later leaves a name behind."""
    where = table(max_sequences=2)
    for i in range(100):
        seq = opened(where, f"r{i}", 35)
        feed(where, seq)
        assert where.take(seq, [1, 1]) is None
        assert seq.refused == "context"
    assert sum(where.find(b"p", f"r{i}") is not None for i in range(100)) == 16
    assert where.num_live == 0
    where.check_partition()


def test_growing_beyond_the_pool_frees_everything() -> None:
    where = table(total_slots=42)
    first, second = opened(where, "a", 10), opened(where, "b", 10)
    feed(where, first)
    assert where.take(first, [7, 7, 7]) is None
    assert first.refused == "full"
    assert not where.holds(first)
    assert second.refused is None
    assert where.num_free_slots == 42
    where.check_partition()


def test_growing_beyond_the_context_is_refused() -> None:
    where = table(total_slots=1000)
    seq = opened(where, "a", 35)
    feed(where, seq)
    assert where.take(seq, [1]) is not None
    assert where.take(seq, [1]) is None
    assert seq.refused == "context"
    assert opened(where, "b", 37).refused == "context"


def test_a_row_that_was_reused_does_not_hold_the_older_opening() -> None:
    where = table(max_sequences=1)
    older = opened(where, "a", 5)
    feed(where, older)
    where.close(older)
    newer = opened(where, "a", 5, generation=2)
    assert newer.row_generation == older.row_generation + 1
    assert where.holds(newer)
    assert not where.holds(older)
    where.check_partition()


def test_a_rewind_takes_back_what_was_counted_as_output() -> None:
    """Red when penalties go on counting ids that never were."""
    where = table()
    seq = DraftedSequence(
        peer=b"p", rid="a", generation=1, rule=DraftRule(prompt_len=2), limits=LIMITS, now=0.0
    )
    where.open(seq, [7, 8])
    feed(where, seq)
    where.take(seq, [20, 21, 21])
    assert seq.committed_output().counts == {20: 1, 21: 2}
    where.rewind(seq, 3)
    assert seq.committed_output().counts == {20: 1}
    where.take(seq, [22])
    assert list(seq.committed_output().tokens) == [20, 22]


def test_a_rewound_sequence_is_the_last_in_line() -> None:
    where = table()
    first, second = opened(where, "a", 5), opened(where, "b", 5)
    assert list(where) == [first, second]
    where.rewind(first, 3)
    assert list(where) == [second, first]
    where.check_partition()


def test_leases_end_what_is_not_heard_of() -> None:
    where = table()
    stale, fresh = opened(where, "a", 5), opened(where, "b", 5)
    fresh.last_seen = 9.0
    assert where.expire(before=5.0) == 1
    assert where.find(b"p", "a") is None
    assert not where.holds(stale)
    assert where.holds(fresh)


@pytest.mark.parametrize("break_it", ["lose", "double", "mirror"])
def test_the_partition_check_sees_a_lost_a_doubled_and_a_misplaced_slot(break_it: str) -> None:
    where = table()
    seq = opened(where, "a", 5)
    feed(where, seq)
    where.check_partition()
    match break_it:
        case "lose":
            where.slots_for(1)
        case "double":
            where.give_back(np.array([seq.cache.slots[0]]))
        case "mirror":
            seq.line_slots[0] = seq.line_slots[1]
    with pytest.raises(AssertionError):
        where.check_partition()
