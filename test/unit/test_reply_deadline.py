"""How long a round waits: bounds, adaptation, one wait for a stop, few for a slow drafter."""

from __future__ import annotations

from sglang_ssd.target.reply_deadline import ReplyDeadline


def answering(*replies_s: float, least_s: float = 0.1, most_s: float = 0.5) -> ReplyDeadline:
    deadline = ReplyDeadline(least_s=least_s, most_s=most_s)
    for took in replies_s:
        deadline.note_heard(0.0)
        deadline.note_reply(took)
    return deadline


def test_few_replies_teach_nothing() -> None:
    assert answering(*[0.001] * 7).seconds == 0.5


def test_the_wait_is_twice_the_slowest_reply_within_bounds() -> None:
    assert answering(*[0.09] * 7, 0.11).seconds == 0.22
    assert answering(*[0.001] * 8).seconds == 0.1
    assert answering(*[0.4] * 8).seconds == 0.5
    assert answering(*[9.0] * 8).seconds == 0.5


def test_the_least_never_exceeds_the_most() -> None:
    assert answering(*[0.001] * 8, least_s=0.1, most_s=0.02).seconds == 0.02


def test_old_replies_are_forgotten() -> None:
    assert answering(0.25, *[0.08] * 255).seconds == 0.5
    assert answering(0.25, *[0.08] * 256).seconds == 0.16


def test_silence_ends_all_waits_until_something_is_heard() -> None:
    deadline = answering()
    assert deadline.next_wait(10.0) == 0.5
    deadline.note_missed(10.5)
    assert [deadline.next_wait(now) for now in (10.5, 60.0, 600.0)] == [0.0] * 3
    deadline.note_heard(600.0)
    assert deadline.next_wait(600.0) == 0.5


def test_a_slow_drafter_is_tried_ever_more_rarely() -> None:
    """Each try is heard of, but too late; waits are a ninth of the time at most in the end."""
    deadline = answering()
    now, waited = 0.0, 0.0
    for _ in range(1000):
        wait = deadline.next_wait(now)
        now += wait
        if wait:
            deadline.note_heard(now - 0.01)
            deadline.note_missed(now)
            waited += wait
        now += 0.1
        deadline.note_reply(0.9)
    assert waited / now < 0.13


def test_a_late_reply_that_was_quick_enough_ends_the_first_pause() -> None:
    deadline = answering()
    deadline.note_heard(10.4)
    deadline.note_missed(10.5)
    assert deadline.next_wait(10.6) == 0.0
    deadline.note_reply(0.3)
    assert deadline.next_wait(10.6) == 0.5
    deadline.note_heard(11.0)
    deadline.note_missed(11.1)
    deadline.note_reply(0.3)
    assert [deadline.next_wait(now) for now in (11.2, 12.0, 12.2)] == [0.0, 0.0, 0.5]


def test_a_quick_reply_to_a_part_of_a_round_ends_no_pause() -> None:
    """Red when a batch with one quick row waits for its slow ones in every round."""
    deadline = answering()
    deadline.note_heard(10.4)
    deadline.note_missed(10.5)
    deadline.note_reply(0.002, is_last=False)
    assert deadline.next_wait(10.6) == 0.0
    deadline.note_reply(0.3, is_last=True)
    assert deadline.next_wait(10.6) == 0.5


def test_a_late_reply_that_came_while_nobody_looked_has_the_benefit_of_the_doubt() -> None:
    """A verify of 0.6 s after a wait of 0.1 s: it may have come right behind the wait."""
    deadline = answering()
    deadline.note_heard(10.4)
    deadline.note_missed(10.5)
    deadline.note_reply(0.9, at_least_s=0.7)
    assert deadline.next_wait(10.6) == 0.0
    deadline.note_reply(0.7, at_least_s=0.1)
    assert deadline.next_wait(10.6) == 0.5


def test_a_reply_that_nobody_looked_for_teaches_nothing() -> None:
    """Red when a reply that lay unread during a prefill of 3 s is taken for a slow one, or when one
    that was not there at the end of its wait no longer is."""
    deadline = answering(*[0.02] * 300)
    assert deadline.seconds == 0.1
    deadline.note_reply(3.0, at_least_s=0.001)
    assert deadline.seconds == 0.1
    deadline.note_reply(3.0, at_least_s=0.1)
    assert deadline.seconds == 0.5


def test_a_long_silence_outlasts_the_pause_and_ends_what_was_learnt() -> None:
    """Misses still count: a drafter that says hello and nothing else is tried ever more rarely."""
    deadline = answering(*[0.001] * 8)
    assert deadline.seconds == 0.1
    for now in (1.0, 2.0, 3.0):
        deadline.note_heard(now - 0.1)
        deadline.note_missed(now)
    deadline.note_missed(30.0)
    assert deadline.is_silent
    deadline.note_heard(90.0)
    assert deadline.next_wait(90.0) == 0.5
    deadline.note_missed(90.5)
    deadline.note_heard(90.6)
    assert [deadline.next_wait(now) for now in (94.4, 94.6)] == [0.0, 0.5]
