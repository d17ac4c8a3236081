"""How long a round may wait for its drafts, learnt from how long replies took.

    answering   wait for twice the slowest of the last replies, within the two bounds
    late        heard of, but too late: no wait for 1, 2, 4, 8 longest waits, then another try; a
                round whose last reply may have been quick enough ends the first pause at once
    silent      nothing heard within a wait: no wait at all until something is heard

So a drafter that stops costs one wait, and one that is always too slow a ninth of the time at most.
"""

from __future__ import annotations

from collections import deque

_WINDOW = 256  # a miss now and then, which takes the drafter longest, is to be remembered
_LEAST_SAMPLES = 8
_MARGIN = 2.0
_MOST_DOUBLINGS = 3
_STOP_S = 1.0  # a silence this long was a stop, not slowness: the replies before it say nothing


class ReplyDeadline:
    """Replies and misses in, the next wait out. Times are seconds of one monotonic clock."""

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._most_s = most_s
        self._least_s = min(least_s, most_s)
        self._replies: deque[float] = deque(maxlen=_WINDOW)
        self._misses = 0
        self._paused_until = 0.0
        self._heard_at = 0.0
        self.is_silent = False

    @property
    def seconds(self) -> float:
        """The wait as it is now."""
        if len(self._replies) < _LEAST_SAMPLES:
            return self._most_s
        return min(self._most_s, max(self._least_s, _MARGIN * max(self._replies)))

    def next_wait(self, now: float) -> float:
        """How long the round that starts now may wait."""
        return 0.0 if self.is_silent or now < self._paused_until else self.seconds

    def note_reply(
        self, took_s: float, *, at_least_s: float | None = None, is_last: bool = True
    ) -> None:
        """A reply, on time or not, found took_s after its question; at_least_s: when it was not
        there yet, for one that came while nobody looked; is_last: no row of the round is owed one.

        One that may have come in time, and was found later because nobody looked, teaches nothing.
        """
        least_s = took_s if at_least_s is None else at_least_s
        if took_s <= self.seconds or least_s >= self.seconds:
            self._replies.append(min(took_s, self._most_s))
        if is_last and least_s <= self._most_s and self._misses == 1:
            self._paused_until = 0.0

    def note_kept(self) -> None:
        """A round that asked for drafts had them all."""
        self._misses = 0
        self._paused_until = 0.0

    def note_missed(self, now: float, *, is_reading: bool = False) -> None:
        """A wait ended without all drafts; is_reading: all that is missing are drafts behind
        prompts that the drafter says it reads, which makes it no slow one."""
        if self._heard_at < now - self.seconds:
            self.is_silent = True
        if is_reading:
            return
        self._paused_until = now + self._most_s * 2 ** min(self._misses, _MOST_DOUBLINGS)
        self._misses += 1

    def note_heard(self, now: float) -> None:
        """Any message of the drafter."""
        if self.is_silent and now - self._heard_at > _STOP_S:
            self._replies.clear()
        self.is_silent = False
        self._heard_at = now

    def note_unreachable(self) -> None:
        """Nobody took a message: nothing to wait for."""
        self.is_silent = True

    def start_afresh(self) -> None:
        """Another drafter."""
        self._replies.clear()
        self._misses = 0
        self._paused_until = 0.0
        self.is_silent = False
