"""What was refused, or went wrong, by cause: counted always, logged once per cause and interval.

A peer that sends nonsense a thousand times a second fills no log with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 60.0


class NoticeLog:
    """Counts by cause; causes are a fixed few words, never what a peer said."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: dict[str, int] = {}
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._logged_counts: dict[str, int] = {}

    def warn(self, cause: str, text: str) -> None:
        """Count it; log the text unless this cause was logged within the interval."""
        count = self.counts.get(cause, 0) + 1
        self.counts[cause] = count
        now = self._clock()
        last = self._logged_at.get(cause)
        if last is not None and now - last < self._interval_s:
            return
        unlogged = count - 1 - self._logged_counts.get(cause, 0)
        more = f" ({unlogged} more like it before)" if unlogged else ""
        self._logged_at[cause] = now
        self._logged_counts[cause] = count
        self._logger.warning("%s%s", text, more)
