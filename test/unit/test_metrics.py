"""The metrics follow the counters; the dashboard asks for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_ssd.target.metrics import (
    METRICS,
    PREFIX,
    TIME_BUCKETS,
    MetricsExporter,
    Values,
    values_of,
)
from sglang_ssd.target.reporting import log_line
from sglang_ssd.target.stats import PLAIN_CAUSES, ClientStats
from sglang_ssd.wire.messages import REFUSED_CAUSES, DrafterStatus
from sglang_ssd.wire.transport import TransportStats

prometheus_client = pytest.importorskip("prometheus_client", reason="comes with sglang")

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"
LABELS = {"model_name": "m", "tp_rank": "0"}
STATUS = DrafterStatus(
    live_sequences=2,
    free_slots=75,
    total_slots=100,
    branch_steps=10,
    jit_steps=3,
    prefill_tokens=40,
    hits=5,
    misses=1,
    stale_commits=1,
    drafting_seconds=0.5,
    branch_step_seconds=0.25,
    dropped_replies=1,
    resident_bytes=1 << 30,
    device_bytes=0,
    refused={"key": 2},
)


def stats_after(rows: int) -> ClientStats:
    stats = ClientStats(rounds=rows, rows=rows, stale_replies=2)
    for index in range(rows):
        if index % 3:
            stats.count_served("hit" if index % 3 == 1 else "jit")
        else:
            stats.count_plain(PLAIN_CAUSES[index % 2])
    stats.count_accepted([index % 5 for index in range(rows)])
    for rank in (-1, 0, 0, 2):
        stats.count_rank(rank)
    return stats


def values(stats: ClientStats, status: DrafterStatus | None = STATUS) -> Values:
    transport = TransportStats(malformed=4)
    return values_of(stats, num_live=1, num_restarts=2, transport=transport, status=status)


class Exported:
    """An exporter with a registry of its own, and what a scrape of it shows."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.exporter = MetricsExporter(LABELS, registry=self.registry)

    def samples(self, name: str) -> dict[str, float]:
        """By the metric's own label."""
        found = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == PREFIX + name:
                    own = [v for k, v in sample.labels.items() if k not in LABELS]
                    found["".join(own)] = sample.value
        return found


def test_counters_follow_and_add_up() -> None:
    exported = Exported()
    for rows in (7, 7, 20):
        stats = stats_after(rows)
        exported.exporter.export(values(stats))
        plain = exported.samples("plain_decode_rounds_total")
        assert plain == stats.plain_decode
        (hits,) = exported.samples("hits_total").values()
        (misses,) = exported.samples("misses_total").values()
        (rounds,) = exported.samples("rounds_total").values()
        assert hits + misses + sum(plain.values()) == rounds == rows
        assert exported.samples("accept_length_count") == {"": rows}
        assert exported.samples("accept_length_sum") == {"": rows + stats.correct_drafts}
    assert exported.samples("dropped_replies_total") == {"stale": 2, "bad": 0, "malformed": 4}
    assert exported.samples("drafter_memory_bytes") == {"resident": 1 << 30, "device": 0}
    assert exported.samples("drafter_kv_usage") == {"": 0.25}
    none = dict.fromkeys(REFUSED_CAUSES, 0)
    dropped = {**none, "key": 2, "stale_commit": 1, "undelivered_reply": 1}
    assert exported.samples("drafter_dropped_messages_total") == dropped


def test_a_drafter_that_starts_anew_does_not_count_backwards() -> None:
    exported = Exported()
    exported.exporter.export(values(stats_after(1)))
    exported.exporter.export(
        values(stats_after(1), msgspec.structs.replace(STATUS, branch_steps=4))
    )
    assert exported.samples("branch_steps_total") == {"": 14}


def test_round_times_are_histograms() -> None:
    exported = Exported()
    exported.exporter.observe_round(round_s=0.04, verify_s=0.03, wait_s=0.0001)
    assert exported.samples("round_seconds_sum") == {"": 0.04}
    assert exported.samples("verify_seconds_count") == {"": 1}
    assert exported.samples("reply_wait_seconds_bucket")["0.0002"] == 1


def test_a_rank_is_observed_when_there_is_one() -> None:
    exported = Exported()
    for rows in (4, 8):
        exported.exporter.export(values(stats_after(rows)))
    buckets = exported.samples("bonus_rank_bucket")
    assert (buckets["0.0"], buckets["1.0"], buckets["2.0"]) == (2, 2, 3)


def test_every_metric_is_filled() -> None:
    """Red when a metric is declared and nothing moves it, or values have no metric."""
    histograms = [metric for metric in METRICS if metric.kind == "histogram"]
    times = {metric.name for metric in histograms if metric.buckets == TIME_BUCKETS}
    assert set(values(stats_after(4))) | times == {metric.name for metric in METRICS}


def queries(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_what_is_exported() -> None:
    names = {name: metric for metric in METRICS for name in metric.sample_names}
    asked = set()
    for query in queries(json.loads(DASHBOARD.read_text())):
        found = re.findall(rf"{PREFIX}\w+", query)
        assert found, query
        assert set(found) <= set(names), query
        grouped = {
            word
            for group in re.findall(r"by \(([^)]*)\)", query)
            for word in re.split(r",\s*", group)
        }
        own = {names[name].label for name in found} | {"le", "model_name", "dp_rank"}
        assert grouped <= own, query
        asked |= {names[name].name for name in found}
    assert asked == {metric.name for metric in METRICS}, "every metric has a place"


def test_the_log_line_tells_of_the_interval_alone() -> None:
    before, after = stats_after(6), stats_after(15)
    after.round_seconds = 0.9
    line = log_line(before, after, num_live=3)
    assert line.startswith("SSD rounds, #round: 9, #row: 9, #hit: 3, #miss: 3, #plain: 3 (")
    assert "round (ms): 100.00" in line
    assert "hit rate: 0.50" in line
