"""What a round pays for being told of, and when the rest is done."""

from __future__ import annotations

import logging

import pytest

from sglang_ssd.target.metrics import Values
from sglang_ssd.target.reporting import EXPORT_INTERVAL_S, STATUS_INTERVAL_S, RoundReporter
from sglang_ssd.target.stats import ClientStats
from sglang_ssd.wire.transport import TransportStats


class Client:
    """As much of a DraftClient as a reporter looks at."""

    def __init__(self) -> None:
        self.stats = ClientStats()
        self.transport_stats = TransportStats()
        self.drafter_status = None
        self.num_live = 1
        self.num_restarts = 0
        self.status_requests = 0
        self.polls = 0

    def request_status(self) -> None:
        self.status_requests += 1

    def receive(self) -> None:
        self.polls += 1


class Exporter:
    def __init__(self) -> None:
        self.rounds: list[tuple[float, float, float]] = []
        self.exports: list[Values] = []

    def observe_round(self, *, round_s: float, verify_s: float, wait_s: float) -> None:
        self.rounds.append((round_s, verify_s, wait_s))

    def export(self, values: Values) -> None:
        self.exports.append(values)


class Times:
    def __init__(self, now: float) -> None:
        self.started, self.drafts_here, self.outcome_known = now - 0.5, now - 0.4, now - 0.1


class Bench:
    """A reporter on a clock that the test moves."""

    def __init__(self, log_interval: int = 100) -> None:
        self.now = 1000.0
        self.client, self.exporter = Client(), Exporter()
        self.reporter = RoundReporter(
            self.client,
            exporter=self.exporter,
            log_interval=log_interval,
            clock=lambda: self.now,
        )

    def round(self, *, wait_s: float = 0.05) -> None:
        stats = self.client.stats
        stats.rounds += 1
        stats.rows += 1
        stats.count_served("hit")
        stats.reply_wait_seconds += wait_s
        self.reporter.note_round(Times(self.now))


def test_times_of_a_round() -> None:
    bench = Bench()
    bench.round(wait_s=0.05)
    bench.round(wait_s=0.02)
    assert bench.exporter.rounds[0] == pytest.approx((0.5, 0.3, 0.05))
    assert bench.exporter.rounds[1] == pytest.approx((0.5, 0.3, 0.02))
    assert bench.client.stats.round_seconds == pytest.approx(1.0)
    assert bench.client.stats.verify_seconds == pytest.approx(0.6)


def test_export_and_status_are_rare() -> None:
    """Red when every round pays for them."""
    bench = Bench()
    rounds = 200
    for _ in range(rounds):
        bench.round()
        bench.now += 0.05
    seconds = rounds * 0.05
    assert len(bench.exporter.exports) == pytest.approx(seconds / EXPORT_INTERVAL_S, abs=1)
    assert bench.client.status_requests == pytest.approx(seconds / STATUS_INTERVAL_S, abs=1)
    assert bench.client.polls == 0, "replies are taken in by the rounds themselves"


def test_an_idle_scheduler_may_ask_all_the_time() -> None:
    bench = Bench()
    bench.round()
    for _ in range(1100):
        bench.now += 0.002
        bench.reporter.note_idle()
    assert bench.client.polls == 2
    assert bench.exporter.exports[-1]["rounds"] == {"": 1}


def test_a_line_for_every_interval(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(log_interval=4)
    with caplog.at_level(logging.INFO):
        for _ in range(11):
            bench.round()
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert all(line.startswith("SSD rounds, #round: 4, #row: 4, #hit: 4,") for line in lines)
