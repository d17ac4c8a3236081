"""The tree mask as drawn, rotary positions, and which guesses a chain allows."""

import numpy as np
import pytest

from sglang_ssd.core.outcome_tree import Cohort, choose_branches, rotary_positions, tree_mask


def drawn(text: str) -> list[list[bool]]:
    return [[cell == "1" for cell in line.split()] for line in text.strip().splitlines()]


DRAWN_PASSES = [
    (
        [Cohort((1,), 0), Cohort((0, 0, 1), 0)],  # d2 is fed beside n0 n1 n2
        2,
        """
        1 1   1 0 0 0
        1 0   0 1 0 0
        1 0   0 0 1 0
        1 1   0 0 0 1
        """,
    ),
    (
        [Cohort((0, 0, 1), 1), Cohort((2,), 0)],
        3,
        """
        1 0 0   1 0 0   1 0 0 0
        1 0 0   0 1 0   0 1 0 0
        1 1 0   0 0 1   0 0 1 0
        1 1 1   0 0 0   0 0 0 1
        """,
    ),
    ([Cohort((2,), 1)], 3, "1 1 1   1   1"),
]


@pytest.mark.parametrize(
    ("cohorts", "chain_len", "expected"), DRAWN_PASSES, ids=["pass 0", "pass 1", "pass 2"]
)
def test_masks_of_a_round_are_as_drawn(cohorts, chain_len, expected):
    assert tree_mask(cohorts, chain_len=chain_len).tolist() == drawn(expected)


def test_earlier_steps_lie_cohort_by_cohort():
    mask = tree_mask([Cohort((0, 1), 2), Cohort((2, 2), 1)], chain_len=3)
    assert mask.tolist() == drawn("""
        1 0 0   1 0   1 0   0 0   1 0 0 0
        1 1 0   0 1   0 1   0 0   0 1 0 0
        1 1 1   0 0   0 0   1 0   0 0 1 0
        1 1 1   0 0   0 0   0 1   0 0 0 1
    """)


def test_mask_of_a_chain_without_drafts():
    mask = tree_mask([Cohort((0, 0), 0)], chain_len=1)
    assert mask.tolist() == drawn("""
        1   1 0
        1   0 1
    """)


def test_rotary_positions_follow_the_guessed_text_not_the_slots():
    # 10 committed ids: the bonus is at 9, d1 at 10; branch (0, c) puts c at 10, (2, c) at 12.
    assert rotary_positions(np.array([0, 2]), committed_len=10, step=0).tolist() == [10, 12]
    assert rotary_positions(np.array([0, 2]), committed_len=10, step=3).tolist() == [13, 15]


def branches(drafts, candidates, fan_out):
    columns = choose_branches(drafts, [np.array(row) for row in candidates], fan_out=fan_out)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_next_draft_is_no_guess_where_the_chain_goes_on():
    chosen = branches([7, 8], [[7, 1, 2], [8, 3, 4], [5, 6, 9]], [2, 1, 2])
    assert chosen == [(0, 1, 0), (0, 2, 1), (1, 3, 0), (2, 5, 0), (2, 6, 1)]


def test_a_draft_that_is_not_the_best_candidate_is_left_out_too():
    assert branches([2], [[1, 2, 3], [4, 5, 6]], [3, 0]) == [(0, 1, 0), (0, 3, 1)]


def test_without_drafts_nothing_is_left_out():
    assert branches([], [[7, 1, 2]], [3]) == [(0, 7, 0), (0, 1, 1), (0, 2, 2)]


def test_positions_without_candidates_get_no_branch():
    assert branches([7, 8], [[7, 1, 2]], [1, 1, 1]) == [(0, 1, 0)]
