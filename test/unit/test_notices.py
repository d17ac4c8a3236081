"""What fills no log, however often it happens, over a clock that is set by hand."""

from __future__ import annotations

import logging

import pytest

from sglang_ssd.wire.notices import INTERVAL_S, NoticeLog

LOGGER = logging.getLogger("test_notices")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def notices(clock: Clock) -> NoticeLog:
    return NoticeLog(LOGGER, clock=clock)


def test_one_line_per_interval_says_how_many_it_stands_for(
    notices: NoticeLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when every one is logged, or the next line comes early, late or without their number."""
    for _ in range(3):
        notices.warn("oversize", "too large")
    assert caplog.messages == ["too large"]
    clock.now = INTERVAL_S - 0.1
    notices.warn("oversize", "too large")
    assert caplog.messages == ["too large"]
    clock.now = INTERVAL_S
    notices.warn("oversize", "too large again")
    assert caplog.messages == ["too large", "too large again (3 more like it before)"]
    clock.now = 2 * INTERVAL_S
    notices.warn("oversize", "once more")
    assert caplog.messages[2:] == ["once more"], "what was told is not told again"
    assert notices.counts == {"oversize": 6}


def test_causes_are_independent(
    notices: NoticeLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when one cause keeps another out of the log, or counts for it."""
    notices.warn("oversize", "too large")
    clock.now = INTERVAL_S / 2
    notices.warn("header", "no header")
    notices.warn("oversize", "too large")
    assert caplog.messages == ["too large", "no header"]
    clock.now = INTERVAL_S
    notices.warn("header", "no header")
    notices.warn("oversize", "too large")
    assert caplog.messages[2:] == ["too large (1 more like it before)"]
    assert notices.counts == {"oversize": 3, "header": 2}


def test_an_interval_may_be_another(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Red when the interval that is asked for is not kept to."""
    notices = NoticeLog(LOGGER, interval_s=5.0, clock=clock)
    for now in (0.0, 4.9, 5.0):
        clock.now = now
        notices.warn("key", "unknown key")
    assert caplog.messages == ["unknown key", "unknown key (1 more like it before)"]
