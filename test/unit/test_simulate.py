"""The model of a round: what the theory says of its limits, and the drafter's loop by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import simulate


def times(*, branch_step: float) -> simulate.Times:
    return simulate.Times(
        verify={1: 100.0, 5: 100.0}, branch_step={1: branch_step}, decode=20.0, host=0.0
    )


def rates(*, acceptance: float, hit: float) -> simulate.Rates:
    return simulate.Rates(
        acceptance=acceptance, hit_after_rejection={3: hit}, hit_after_all_accepted={3: hit}
    )


def test_with_every_outcome_guessed_the_gain_over_sd_is_the_hidden_drafting() -> None:
    sure = rates(acceptance=0.8, hit=1.0)
    sd = simulate.predict_sd(times(branch_step=20.0), sure, 4)
    ssd = simulate.predict_ssd(times(branch_step=20.0), sure, 4, 3)
    assert sd.round_ms / ssd.round_ms == pytest.approx(1 + 4 * 20 / 100)  # 1 + T_SD
    assert sd.tokens == ssd.tokens == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_without_a_hit_ssd_is_sd() -> None:
    never = rates(acceptance=0.8, hit=0.0)
    sd = simulate.predict_sd(times(branch_step=20.0), never, 4)
    ssd = simulate.predict_ssd(times(branch_step=20.0), never, 4, 3)
    assert ssd.round_ms == pytest.approx(sd.round_ms)


def test_a_build_that_does_not_fit_waits_for_its_pass_and_finishes_alone() -> None:
    ssd = simulate.predict_ssd(times(branch_step=40.0), rates(acceptance=0.8, hit=1.0), 4, 3)
    # Three passes of 40 begin in 100 ms, the third ends 20 late. One draft of four is left to
    # single steps, two where all drafts were right.
    assert ssd.round_ms == pytest.approx(100 + 20 + (1 + 0.8**4) * 20)


def test_passes_of_a_tree() -> None:
    assert simulate.pass_rows(4, 3) == [13, 15, 15, 15, 3]
    assert simulate.pass_rows(1, 2) == [3, 2]
    assert sum(simulate.pass_rows(5, 4)) == 24 * 5 + 1


@pytest.mark.parametrize(
    ("building", "expected"), [(100, (2, 0)), (101, (3, 9)), (500, (3, 0)), (0, (0, 0))]
)
def test_passes_begun_in_time(building: float, expected: tuple[int, float]) -> None:
    assert simulate.passes_in(building, [50.0, 50.0, 10.0]) == expected


def test_the_best_of_each_mode_is_the_cheapest_per_token() -> None:
    found = simulate.predict_all(
        times(branch_step=20.0), rates(acceptance=0.5, hit=0.9), [1, 2, 4], [3]
    )
    assert [one.mode for one in found].count("SSD") == 3
    assert simulate.best(found, "AR").ms_per_token == 100
    assert simulate.best(found, "SSD").num_steps == 4
