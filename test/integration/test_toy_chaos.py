"""A short run of test/faults/toy_chaos.py."""

from __future__ import annotations

from faults.toy_chaos import IN_FLIGHT, ToyChaos


def test_faults_cost_speed_and_nothing_else() -> None:
    """Red when a fault changes an answer, keeps hits away, or leaves something behind."""
    chaos = ToyChaos(seed=3)
    chaos.run(num_faults=28)
    chaos.end()
    stats = chaos.server.client.stats
    assert chaos.num_answers > IN_FLIGHT
    assert stats.hits / stats.rows > 0.5
    assert stats.rows == stats.hits + stats.misses + sum(stats.plain_decode.values())
    table = chaos.server.loop.table
    assert table.num_live == 0
    assert table.num_free_slots == table.total_slots
