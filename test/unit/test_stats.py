"""Every row is counted once; sums and rates follow from that."""

from __future__ import annotations

from typing import get_args

from sglang_ssd.target.stats import PLAIN_CAUSES, ClientStats, summarize
from sglang_ssd.wire.messages import Served


def filled() -> ClientStats:
    stats = ClientStats(rounds=4, rows=10)
    for served in ("hit", "hit", "chain_hit", "jit", "none", "prefill"):
        stats.count_served(served)
    for cause in ("late", "late", "opt_out", "batch_size"):
        stats.count_plain(cause)
    stats.count_accepted([4, 0, 0, 2])
    return stats


def test_hits_misses_and_plain_rows_are_all_rows() -> None:
    stats = filled()
    assert (stats.hits, stats.misses) == (3, 2)
    assert stats.plain_decode == {"prefill": 1, "late": 2, "opt_out": 1, "batch_size": 1}
    assert stats.hits + stats.misses + sum(stats.plain_decode.values()) == stats.rows
    assert (stats.on_time_rows, stats.missing_rows) == (5, 2)
    assert (stats.plain_rows, stats.prefill_rows) == (2, 1)


def test_every_reply_in_time_falls_into_one_class() -> None:
    for served in get_args(Served):
        stats = ClientStats(rows=1)
        stats.count_served(served)
        assert stats.hits + stats.misses + sum(stats.plain_decode.values()) == 1
    assert len(set(PLAIN_CAUSES)) == len(PLAIN_CAUSES)


def test_summary_has_the_rates() -> None:
    summary = summarize(filled())
    assert summary["hit_rate"] == 3 / 5
    assert summary["on_time_rate"] == 5 / 7
    assert summary["accept_length"] == 1.6
    assert summary["accept_lens"] == {"5": 1, "1": 2, "3": 1}
    assert summarize(ClientStats())["hit_rate"] == 0.0
