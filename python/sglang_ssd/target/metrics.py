"""The Prometheus metrics that SSD adds to SGLang's own /metrics, with --enable-metrics.

SGLang uses prometheus_client's multiprocess mode: the scheduler process writes values to files and
the HTTP process collects them. So prometheus_client may be imported here only once that mode is
chosen, in the scheduler process, and what is exported must be its own counters. They follow
ClientStats and the drafter's DrafterStatus by differences, at intervals; the times of a round alone
are observed as they happen.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import msgspec

from sglang_ssd.config import MAX_NUM_STEPS
from sglang_ssd.target.stats import NOT_GUESSED, ClientStats
from sglang_ssd.wire.messages import REFUSED_CAUSES, DrafterStatus
from sglang_ssd.wire.transport import TransportStats

PREFIX = "sglang:ssd_"

TIME_BUCKETS = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
"""Seconds; upper bounds."""
ACCEPT_LENGTH_BUCKETS = tuple(range(1, MAX_NUM_STEPS + 2))
BONUS_RANK_BUCKETS = (*range(8), 11, 15, 23, 31)


class Metric(msgspec.Struct, frozen=True):
    """One metric; `name` lacks the prefix, and a counter's lacks "_total"."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    label: str | None = None
    """Of its own, beside SGLang's."""
    buckets: tuple[float, ...] = TIME_BUCKETS
    """Upper bounds, of a histogram."""

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that queries use."""
        if self.kind == "counter":
            return (f"{PREFIX}{self.name}_total",)
        if self.kind == "gauge":
            return (PREFIX + self.name,)
        return tuple(f"{PREFIX}{self.name}_{part}" for part in ("bucket", "sum", "count"))


METRICS = (
    Metric("rounds", "counter", "Rounds, counted per request: hits + misses + plain decode."),
    Metric("hits", "counter", "Rounds whose outcome was guessed and drafted for when it came."),
    Metric(
        "misses",
        "counter",
        "Rounds whose outcome was not guessed, or not drafted for yet.",
    ),
    Metric("plain_decode_rounds", "counter", "Rounds without speculation, by cause.", "cause"),
    Metric("correct_drafts", "counter", "Drafts that the target agreed with."),
    Metric(
        "accept_length",
        "histogram",
        "Tokens that a round gained, bonus included.",
        buckets=ACCEPT_LENGTH_BUCKETS,
    ),
    Metric(
        "bonus_rank",
        "histogram",
        "Rank of a guessed bonus among the guesses of its position; 0: the likeliest.",
        buckets=BONUS_RANK_BUCKETS,
    ),
    Metric("round_seconds", "histogram", "From asking for drafts until the outcome is sent."),
    Metric("verify_seconds", "histogram", "From drafts in hand until the outcome is known."),
    Metric("reply_wait_seconds", "histogram", "Wait for the drafter's reply in a round."),
    Metric("missed_deadlines", "counter", "Rounds that waited for drafts in vain."),
    Metric("dropped_replies", "counter", "Replies not used, by cause.", "cause"),
    Metric("resyncs", "counter", "Requests that the drafter had lost and was told again."),
    Metric("drafter_restarts", "counter", "Times that another drafter took over."),
    Metric("degraded", "gauge", "1 while the drafter is silent or not ready, else 0."),
    Metric("live_sequences", "gauge", "Requests that the target mirrors."),
    Metric("drafter_live_sequences", "gauge", "Sequences that the drafter holds."),
    Metric("drafter_kv_usage", "gauge", "Share of the drafter's KV slots that is taken."),
    Metric(
        "drafter_memory_bytes", "gauge", "Memory of the drafter process, by where it is.", "kind"
    ),
    Metric("branch_steps", "counter", "Forwards over trees of branches."),
    Metric("branch_step_seconds", "counter", "Time in forwards over trees of branches."),
    Metric("drafting_seconds", "counter", "Time in all forwards of the drafter."),
    Metric("jit_steps", "counter", "Forwards for requests that a target was waiting for."),
    Metric(
        "drafter_prefill_tokens", "counter", "Tokens that prefill slices of the drafter have read."
    ),
    Metric(
        "drafter_dropped_messages",
        "counter",
        "Messages that the drafter could not use or deliver, by cause.",
        "cause",
    ),
)

Values = dict[str, dict[str, float]]
"""By metric and by the value of its own label, "" if it has none; of a histogram, how often
each value was seen."""


def values_of(
    stats: ClientStats,
    *,
    num_live: int,
    num_restarts: int,
    transport: TransportStats,
    status: DrafterStatus | None,
) -> Values:
    """What every counter, gauge and histogram of counted values stands at."""
    plain: dict[str, dict[str, int]] = {
        "plain_decode_rounds": stats.plain_decode,
        "accept_length": stats.accept_lens,
        "bonus_rank": {rank: n for rank, n in stats.bonus_rank.items() if rank != NOT_GUESSED},
        "dropped_replies": {
            "stale": stats.stale_replies,
            "bad": stats.bad_replies,
            "malformed": transport.malformed,
        },
    }
    single = {
        "rounds": stats.rows,
        "hits": stats.hits,
        "misses": stats.misses,
        "correct_drafts": stats.correct_drafts,
        "missed_deadlines": stats.missed_deadlines,
        "resyncs": stats.resyncs,
        "drafter_restarts": num_restarts,
        "degraded": int(stats.degraded),
        "live_sequences": num_live,
    }
    values: Values = {name: {"": number} for name, number in single.items()}
    values |= {name: dict(numbers) for name, numbers in plain.items()}
    return values if status is None else values | _drafter_values(status)


def _drafter_values(status: DrafterStatus) -> Values:
    return {
        "drafter_live_sequences": {"": status.live_sequences},
        "drafter_kv_usage": {"": 1 - status.free_slots / max(1, status.total_slots)},
        "drafter_memory_bytes": {
            "resident": status.resident_bytes,
            "device": status.device_bytes,
        },
        "branch_steps": {"": status.branch_steps},
        "branch_step_seconds": {"": status.branch_step_seconds},
        "drafting_seconds": {"": status.drafting_seconds},
        "jit_steps": {"": status.jit_steps},
        "drafter_prefill_tokens": {"": status.prefill_tokens},
        "drafter_dropped_messages": {
            "stale_commit": status.stale_commits,
            "undelivered_reply": status.dropped_replies,
            **{cause: status.refused.get(cause, 0) for cause in REFUSED_CAUSES},
        },
    }


class MetricsExporter:
    """Keeps prometheus_client's objects at the values; labels: SGLang's own of this scheduler."""

    def __init__(self, labels: dict[str, str], *, registry: Any = None) -> None:
        # Importing it chooses the kind of values for the whole process: see the module docstring.
        import prometheus_client

        registry = registry or prometheus_client.REGISTRY
        kinds: dict[str, Any] = {
            "counter": prometheus_client.Counter,
            "gauge": partial(prometheus_client.Gauge, multiprocess_mode="mostrecent"),
            "histogram": prometheus_client.Histogram,
        }
        self._labels = labels
        self._metrics: dict[str, Any] = {}
        self._declared = {metric.name: metric for metric in METRICS}
        self._children: dict[tuple[str, str], Any] = {}
        self._exported: dict[tuple[str, str], float] = {}
        for metric in METRICS:
            options = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            names = [*labels, *([metric.label] if metric.label else [])]
            self._metrics[metric.name] = kinds[metric.kind](
                PREFIX + metric.name, metric.text, labelnames=names, registry=registry, **options
            )
        self._round, self._verify, self._wait = (
            self._child(f"{name}_seconds", "") for name in ("round", "verify", "reply_wait")
        )

    def observe_round(self, *, round_s: float, verify_s: float, wait_s: float) -> None:
        self._round.observe(round_s)
        self._verify.observe(verify_s)
        self._wait.observe(wait_s)

    def export(self, values: Values) -> None:
        """Move everything on; a count that fell was started anew."""
        for name, numbers in values.items():
            for key, number in numbers.items():
                before = self._exported.get((name, key))
                if before == number:
                    continue
                self._exported[name, key] = number
                new = number if before is None or number < before else number - before
                self._move(name, key, number, new)

    def _move(self, name: str, key: str, number: float, new: float) -> None:
        kind = self._declared[name].kind
        if kind == "gauge":
            self._child(name, key).set(number)
        elif kind == "counter":
            self._child(name, key).inc(new)
        else:
            for _ in range(int(new)):
                self._child(name, "").observe(float(key))

    def _child(self, name: str, label_value: str) -> Any:
        key = (name, label_value)
        if key not in self._children:
            own_label = self._declared[name].label
            labels = self._labels if own_label is None else {**self._labels, own_label: label_value}
            self._children[key] = self._metrics[name].labels(**labels)
        return self._children[key]
