"""The end-to-end tests' counter of rounds, over a server that is pretended."""

from __future__ import annotations

from typing import Any

import pytest

from harness.rounds import RoundCounter
from sglang_ssd.target.stats import ClientStats, summarize


class Server:
    def __init__(self) -> None:
        self.stats = ClientStats()

    def ssd(self) -> dict[str, Any]:
        return summarize(self.stats)

    def serve(self, num_uncounted: int) -> None:
        """A hit, a miss and two rows of plain decode, and rows that nothing is said of."""
        self.stats.rows += 4 + num_uncounted
        self.stats.count_served("hit")
        self.stats.count_served("jit")
        self.stats.count_plain("opt_out")
        self.stats.count_plain("late")


@pytest.mark.parametrize("num_uncounted", [0, 1, -1])
def test_every_row_is_counted_once(num_uncounted: int) -> None:
    """Red when a row that is forgotten, or counted twice, passes for one that is served."""
    server = Server()
    server.serve(0)
    counter = RoundCounter(server)  # type: ignore[arg-type]
    server.serve(num_uncounted)
    if num_uncounted:
        with pytest.raises(AssertionError, match=f"'plain: late': 1.* of {4 + num_uncounted} rows"):
            counter.since()
    else:
        rounds = counter.since()
        assert (rounds.on_time_rows, rounds.missing_rows, rounds.plain_rows) == (2, 1, 1)
