"""A forward with a prefill slice takes twice what others do at most, whatever the device."""

from __future__ import annotations

from sglang_ssd.drafter.pace import Pace


def test_nothing_measured_takes_the_setting() -> None:
    pace = Pace()
    assert pace.slice_tokens(256) == 256
    pace.note_forward(0.1)
    assert pace.slice_tokens(256) == 256


def test_a_slow_device_gets_few_tokens_and_a_fast_one_all() -> None:
    slow, fast = Pace(), Pace()
    for pace, token_s, forward_s in ((slow, 0.005, 0.1), (fast, 0.00002, 0.005)):
        pace.note_slice(num_tokens=100, seconds=100 * token_s)
        pace.note_forward(forward_s)
    assert slow.slice_tokens(256) == 40
    assert fast.slice_tokens(256) == 256


def test_tokens_of_others_in_the_forward_leave_room_for_fewer() -> None:
    pace = Pace()
    pace.note_slice(num_tokens=100, seconds=0.5)
    pace.note_forward(0.1)
    assert pace.slice_tokens(256, beside=10) == 30
    assert pace.slice_tokens(256, beside=100) == 8, "never nothing"
    assert pace.slice_tokens(1, beside=100) == 1


def test_a_short_prompt_says_little_of_what_a_token_costs() -> None:
    """Red when every forward counts alike: one of 7 tokens takes as long as one of 30."""
    pace = Pace()
    pace.note_forward(0.1)
    for _ in range(20):
        pace.note_slice(num_tokens=100, seconds=0.5)
    before = pace.slice_tokens(256)
    pace.note_slice(num_tokens=7, seconds=0.1)
    assert before == 40
    assert pace.slice_tokens(256) >= 38


def test_it_follows_a_change_and_never_stands_still() -> None:
    pace = Pace()
    pace.note_slice(num_tokens=100, seconds=1.0)
    pace.note_forward(1.0)
    for _ in range(100):
        pace.note_forward(0.001)
    assert pace.slice_tokens(256) == 8
