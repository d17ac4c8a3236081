"""One measurement of one server: answers streamed to a clock, counters before and after, the trace.

Decode rates count from the first token of an answer on, at batch sizes above one only while all
rows are decoding, so prefill is left out. The clock is CLOCK_MONOTONIC, the trace's own.
"""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from servers import Server
from sglang_ssd.target.stats import hit_rate
from timeline import Round, drafting_under_verify, find_rounds, read_trace

REQUEST_LIMIT_S = 3600
FLUSH_AFTER_S = 1.2  # a trace is written once a second, by its next event


class Sampling(msgspec.Struct, frozen=True):
    """How every answer of a run is chosen."""

    temperature: float
    ignore_eos: bool
    seed: int

    def params(self, new_tokens: int, index: int) -> dict[str, object]:
        """SGLang's sampling_params of prompt `index`."""
        params: dict[str, object] = {
            "temperature": self.temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        return params | ({"sampling_seed": self.seed + index} if self.temperature > 0 else {})


class Answer(msgspec.Struct, frozen=True):
    """One streamed answer: how many tokens were there when."""

    times: list[float]  # ms, CLOCK_MONOTONIC, as in the trace
    counts: list[int]
    token_ids: list[int]

    def count_at(self, when: float) -> int:
        return max(
            (n for at, n in zip(self.times, self.counts, strict=True) if at <= when), default=0
        )


class Window(msgspec.Struct, frozen=True):
    """When all rows of a batch were decoding, in ms, and what they decoded."""

    start: float
    end: float
    tokens: int


class Measurement(msgspec.Struct, frozen=True):
    """One candidate at one batch size, once."""

    tokens_per_s: float
    accept_length: float
    hit_rate: float
    on_time_rate: float
    new_tokens: float  # mean length of an answer
    windows: list[Window]
    answers: list[list[int]]


class RoundFigures(msgspec.Struct, frozen=True):
    """Out of the trace, over the measured windows."""

    num_rounds: int
    round_ms: float
    verify_ms: float
    wait_ms: float
    host_ms: float
    round_over_verify: float
    overhead: float  # (round - verify) / verify
    drafting_under_verify: float


class _ChunkMeta(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    meta_info: _ChunkMeta
    output_ids: list[int] = []


def generate(url: str, input_ids: list[int], sampling_params: dict[str, object]) -> Answer:
    """Stream one answer and note when each of its tokens came."""
    body = {"input_ids": input_ids, "sampling_params": sampling_params, "stream": True}
    request = urllib.request.Request(
        f"{url}/generate",
        data=msgspec.json.encode(body),
        headers={"Content-Type": "application/json"},
    )
    decoder = msgspec.json.Decoder(_Chunk)
    times: list[float] = []
    counts: list[int] = []
    token_ids: list[int] = []
    with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic_ns() / 1e6
            chunk = decoder.decode(line[len(b"data: ") :])
            times.append(now)
            counts.append(chunk.meta_info.completion_tokens)
            # Chunks repeat what came before, or do not, as the server is set.
            whole = len(chunk.output_ids) == counts[-1]
            token_ids = chunk.output_ids if whole else token_ids + chunk.output_ids
    if not times:
        raise RuntimeError("the server answered without a token; its log says why")
    return Answer(times=times, counts=counts, token_ids=token_ids)


def find_window(answers: Sequence[Answer]) -> Window | None:
    """From the last first token to the first last one; None if the answers hardly met."""
    start = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    if end <= start:
        return None
    tokens = sum(answer.count_at(end) - answer.count_at(start) for answer in answers)
    return Window(start=start, end=end, tokens=tokens)


def measure(
    server: Server,
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    new_tokens: int,
    sampling: Sampling,
) -> Measurement:
    """All prompts, batch_size at a time; the last batch is filled up from the first."""
    warm_up(server, prompts[0])
    before = ssd_state(server)
    answers: list[Answer] = []
    windows: list[Window] = []
    with ThreadPoolExecutor(batch_size) as threads:
        for start in range(0, len(prompts), batch_size):
            indices = [index % len(prompts) for index in range(start, start + batch_size)]
            group = list(
                threads.map(
                    lambda index: generate(
                        server.url, prompts[index], sampling.params(new_tokens, index)
                    ),
                    indices,
                )
            )
            window = find_window(group)
            windows += [window] if window is not None else []
            answers += group
    counters = counted_between(before, ssd_state(server))
    flush_trace(server, prompts[0])
    seconds = sum(window.end - window.start for window in windows) / 1000
    if not seconds:
        raise RuntimeError("no batch had all rows decoding at once; raise --new-tokens")
    return Measurement(
        tokens_per_s=sum(window.tokens for window in windows) / seconds,
        new_tokens=statistics.fmean(answer.counts[-1] for answer in answers),
        windows=windows,
        answers=[answer.token_ids for answer in answers[: len(prompts)]],
        **counters,
    )


def warm_up(server: Server, prompt: list[int]) -> None:
    generate(server.url, prompt, {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})


def flush_trace(server: Server, prompt: list[int]) -> None:
    """Let both processes write what they hold back, so that a stop loses nothing."""
    if server.spec.traced:
        time.sleep(FLUSH_AFTER_S)
        warm_up(server, prompt)


def ssd_state(server: Server) -> dict[str, Any]:
    """The counters of target/stats.py; {} without a drafter."""
    state: dict[str, Any] = server.get_json("/server_info")["internal_states"][0]
    ssd: dict[str, Any] = state.get("ssd", {})
    return ssd if "rounds" in ssd else {}


def counted_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Rates over what was counted in between; AR counts nothing and accepts one token a round."""
    if not after:
        return {"accept_length": 1.0, "hit_rate": 0.0, "on_time_rate": 0.0}

    def counted(name: str) -> int:
        return int(after[name] - before[name])

    asked = counted("on_time_rows") + counted("missing_rows")
    return {
        "accept_length": 1 + counted("correct_drafts") / max(1, counted("rows")),
        "hit_rate": hit_rate(hits=counted("hits"), misses=counted("misses")),
        "on_time_rate": counted("on_time_rows") / max(1, asked),
    }


def round_figures(trace_files: Iterable[Path], windows: Sequence[Window]) -> RoundFigures | None:
    """Means over the rounds that lie within the windows."""
    rounds: list[Round] = []
    shares = []
    for path in trace_files:
        spans = read_trace(path)
        own = [
            one
            for window in windows
            for one in find_rounds(spans, since=window.start, until=window.end)
        ]
        if own:
            shares.append((len(own), drafting_under_verify(spans, own)))
        rounds += own
    if not rounds:
        return None
    verify = statistics.fmean(one.verify for one in rounds)
    whole = statistics.fmean(one.duration for one in rounds)
    return RoundFigures(
        num_rounds=len(rounds),
        round_ms=whole,
        verify_ms=verify,
        wait_ms=statistics.fmean(one.wait for one in rounds),
        host_ms=statistics.fmean(one.host for one in rounds),
        round_over_verify=whole / verify,
        overhead=(whole - verify) / verify,
        drafting_under_verify=sum(n * share for n, share in shares) / len(rounds),
    )
