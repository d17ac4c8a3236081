"""FR-34: what is told of acceptance is true, adds up and agrees wherever it is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import requests as http

from harness.benchmark import Backend, bench_serving, flags_for
from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all, openai
from harness.drafter_faults import assert_drafts_again, wait_until_ready, without_drafter
from harness.idle import assert_drained
from harness.metrics import assert_soon_shows, samples
from harness.prompts import STORY, load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter
from harness.server import Server

NUM_STEPS = 4
NUM_TOKENS = 41
"""The prefill's token and eight full rounds."""
BOUNDS: dict[DrafterKind, tuple[float, float]] = {
    "self": (0.6, 1.0),
    "random": (0.0, 0.1),
    "noisy": (0.1, 0.9),
}
"""Of the accept rate; its first rounds may find the drafter still reading the prompt."""
LEAST_OF_SELF = 0.97
"""Of the drafts of rows that had some; the others of the target's own drafter are roundings."""
BENCHMARKED = (
    "code-add",
    "story",
    "json",
    "code-palindrome",
    "table",
    "code-fib",
    "list",
    "letter",
)
"""Prompts for an OpenAI endpoint whose answers are ordinary text: there SGLang's benchmark counts
the tokens of a chunk by encoding its text anew."""
NUM_BENCHMARKED = 32
"""Tokens of each answer."""
ITL_ERROR = 0.15
"""Share by which a mean over tokens, times their number, may miss the time that the answers took.
Both are sums of the same gaps between chunks, so a slow machine moves both alike; what is left is
how many tokens the mean is over."""
ACCEPTED = re.compile(r"Decode batch.*accept len: ([\d.]+), accept rate: ([\d.]+)")
"""Of SGLang's log line."""
LAST_INTERVAL = 0.1
"""Share by which SGLang's average may be off: it lacks the rounds since the last log line."""


def assert_adds_up(meta: dict[str, Any]) -> None:
    rounds, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    histogram = meta["spec_correct_drafts_histogram"]
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / rounds)
    assert meta["spec_num_proposed_drafts"] == rounds * NUM_STEPS
    assert meta["spec_accept_rate"] == pytest.approx(correct / (rounds * NUM_STEPS))
    assert meta["spec_accept_rate"] <= 1
    assert sum(histogram) == rounds
    assert sum(k * count for k, count in enumerate(histogram)) == correct
    # The prefill's token, then k + 1 a round; the last round may be cut by the length.
    assert 0 <= 1 + rounds + correct - meta["completion_tokens"] <= NUM_STEPS


def rate_of(answers: list[Answer]) -> float:
    proposed = sum(answer.meta_info["spec_num_proposed_drafts"] for answer in answers)
    return sum(answer.num_correct_drafts for answer in answers) / proposed


def test_fr_34(kind: DrafterKind, server: Server, figures: dict[str, Any]) -> None:
    """Red when the accept lengths that SGLang is told are not those of the rounds, or a number is
    of another kind of drafter than the one that serves."""
    prompts = load_prompts(server.spec.model, 20)
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    cases = [Request(prompt.input_ids, params) for prompt in prompts]
    assert_drained(server)
    assert http.post(f"{server.url}/flush_cache", timeout=60).ok  # SGLang averages anew
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases)
    rounds = counter.since()
    for answer in answers:
        assert_adds_up(answer.meta_info)
    if kind == "self":
        assert rounds.drafted_rows > 0
        assert rounds.correct_drafts >= LEAST_OF_SELF * NUM_STEPS * rounds.drafted_rows
    low, high = BOUNDS[kind]
    figures["accept_rate"] = rate_of(answers)
    assert low <= rate_of(answers) <= high
    state = server.ssd()
    assert state["hits"] + state["misses"] + sum(state["plain_decode"].values()) == state["rows"]
    computed = 1 + NUM_STEPS * rate_of(answers)
    figures.update(computed=computed, averaged=averaged_by(server))
    assert averaged_by(server) == pytest.approx(computed, rel=LAST_INTERVAL)
    assert gauge_of(server) == pytest.approx(logged_by(server), abs=0.01)
    assert 1 + NUM_STEPS * low / 2 <= logged_by(server) <= 1 + NUM_STEPS * min(1, high + 0.1)


def gauge_of(server: Server, name: str = "spec_accept_length") -> float:
    """SGLang's gauge; it and the log line are of the same last interval."""
    return max(samples(server, name).values())


def logged_by(server: Server) -> float:
    return float(ACCEPTED.findall(server.log_text())[-1][0])


def averaged_by(server: Server) -> float:
    return float(internal_state(server)["avg_spec_accept_length"])


def internal_state(server: Server) -> dict[str, Any]:
    state: dict[str, Any]
    (state,) = http.get(f"{server.url}/server_info", timeout=30).json()["internal_states"]
    return state


def test_fr_34_without_a_drafter(
    kind: DrafterKind, struck_server: Server, reference: Reference
) -> None:
    """Red when numbers of a server whose drafter is dead divide by what no round gave, or are other
    than those of plain decode: one token a round, no draft right."""
    server = struck_server
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    cases = [Request(p.input_ids, params) for p in load_prompts(server.spec.model, 4)]
    assert_drained(server)
    with without_drafter(server):
        assert http.post(f"{server.url}/flush_cache", timeout=60).ok  # SGLang averages anew
        assert "avg_spec_accept_length" not in internal_state(server), "of no round"
        counter, log = RoundCounter(server), server.log_text()
        answers = generate_all(server.url, cases)
        for answer in answers:
            assert_adds_up(answer.meta_info)
            assert answer.num_correct_drafts == answer.meta_info["spec_accept_rate"] == 0
        rounds = counter.since()
        assert rounds.plain_decode["drafter_down"] >= len(cases) * (NUM_TOKENS - 1)
        assert (rounds.drafted_rows, rounds.correct_drafts) == (0, 0)
        assert averaged_by(server) == gauge_of(server) == 1
        assert gauge_of(server, "spec_accept_rate") == 0
        assert set(ACCEPTED.findall(server.log_text().removeprefix(log))) == {("1.00", "0.00")}
        assert_soon_shows(server, "ssd_degraded", [1])
    assert_same(reference, cases, answers)
    wait_until_ready(server)
    assert_drafts_again(kind, server, reference)


def test_fr_34_openai(server: Server) -> None:
    """Red when the OpenAI answer has no numbers, or others."""
    body = {"prompt": STORY, "max_tokens": NUM_TOKENS, "return_spec_tokens_details": True}
    answer = openai(server.url, "completions", body)
    details = answer["sglext"]["spec_tokens_details"]
    assert_adds_up({**details, "completion_tokens": answer["usage"]["completion_tokens"]})


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai"])
def test_fr_34_benchmark(
    backend: Backend, kind: DrafterKind, server: Server, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """Red when SGLang's own benchmark finds no accept length, or a chunk's time for a token's."""
    texts = {prompt.name: prompt.text for prompt in load_prompts(server.spec.model, 40)}
    prompts = [text for name in BENCHMARKED if (text := texts[name]) is not None]
    assert len(prompts) == len(BENCHMARKED)
    flags: tuple[str, ...] = ()  # random ids
    if backend == "sglang-oai":
        flags = flags_for(prompts, tmp_path, num_tokens=NUM_BENCHMARKED)
    accept_length, found = bench_serving(
        server,
        tmp_path,
        num_prompts=len(prompts),
        num_tokens=NUM_BENCHMARKED,
        backend=backend,
        flags=flags,
    )
    assert 1 <= accept_length <= NUM_STEPS + 1
    assert not flags or kind == "random" or accept_length > 1 + ITL_ERROR, "a chunk is a token"
    assert found["total_output_tokens"] == len(prompts) * NUM_BENCHMARKED
    decoding_ms = found["mean_e2e_latency_ms"] - found["mean_ttft_ms"]
    behind_first = NUM_BENCHMARKED - 1
    gaps_ms = 1000 * sum(map(sum, found["itls"]))
    figures.update(
        accept_length=accept_length,
        itl_share=found["mean_itl_ms"] * behind_first / decoding_ms,
        counted_tokens=gaps_ms / found["mean_itl_ms"] / len(prompts),
    )
    assert figures["itl_share"] == pytest.approx(1, rel=ITL_ERROR), figures
