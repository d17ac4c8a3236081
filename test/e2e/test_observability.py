"""What a server tells of itself: metrics, log line and /server_info agree and add up."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import requests as http

from harness.client import Request, generate_all
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import Server, ServerPool, ServerSpec
from sglang_ssd.target.metrics import METRICS, PREFIX
from sglang_ssd.target.stats import PLAIN_CAUSES

MAX_BATCH_SIZE = 3
Samples = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def server(pool: ServerPool, spec_for: Any) -> Server:
    spec = spec_for(
        "noisy",
        flags=("--enable-metrics", "--disable-overlap-schedule"),
        settings=(("max_batch_size", MAX_BATCH_SIZE),),
    )
    return pool.get(spec)


def scrape(server: Server) -> Samples:
    """By sample name and by the values of labels that are not SGLang's."""
    sglangs = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "pid"}
    found: Samples = defaultdict(dict)
    for line in http.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        match = re.match(rf"({PREFIX}\w+)\{{(.*)\}} (\S+)", line)
        if match:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            own = "".join(value for name, value in labels.items() if name not in sglangs)
            found[match[1].removeprefix(PREFIX)][own] = float(match[3])
    return found


def settled(server: Server) -> tuple[Samples, dict[str, Any]]:
    """A scrape that shows all that /server_info shows; both follow at intervals."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        state, samples = server.ssd(), scrape(server)
        if samples["rounds_total"].get("") == state["rows"] and samples["branch_steps_total"]:
            return samples, state
        time.sleep(0.5)
    raise AssertionError(f"the metrics stay behind: {samples} {state}")


def cases_of(server: Server, num: int, **params: Any) -> list[Request]:
    prompts = load_prompts(server.spec.model, num)
    return [
        Request(p.input_ids, {"max_new_tokens": 24, "ignore_eos": True, **params}) for p in prompts
    ]


def test_an_opt_out_decodes_plainly_and_its_neighbour_does_not(
    server: Server, reference: Reference
) -> None:
    """Red when custom_params={"ssd": false} is not honoured, or reaches another request."""
    before = server.ssd()
    plain = cases_of(server, 2, custom_params={"ssd": False})
    drafted = cases_of(server, 2, custom_params={"ssd": True})[:1]
    answers = generate_all(server.url, [plain[0], drafted[0], plain[1]])
    assert_same(reference, [plain[0], drafted[0], plain[1]], answers)
    assert answers[0].num_correct_drafts == answers[2].num_correct_drafts == 0
    assert answers[1].num_correct_drafts > 0
    after = server.ssd()
    opted_out = [state["plain_decode"].get("opt_out", 0) for state in (before, after)]
    assert opted_out[1] - opted_out[0] == 2 * 23


def test_large_batches_decode_plainly(server: Server, reference: Reference) -> None:
    """Red when --ssd-max-batch-size is not kept, or speculation does not come back below it."""
    cases = cases_of(server, 8)
    before = server.ssd()
    answers = generate_all(server.url, cases, concurrency=8)
    between = server.ssd()
    assert_same(reference, cases, answers)
    assert between["plain_decode"]["batch_size"] > before["plain_decode"].get("batch_size", 0)
    answers = generate_all(server.url, cases[:4], concurrency=2)
    assert_same(reference, cases[:4], answers)
    after = server.ssd()
    assert after["hits"] > between["hits"]
    assert after["plain_decode"]["batch_size"] == between["plain_decode"]["batch_size"]


def test_metrics_add_up_and_agree_with_the_state(server: Server) -> None:
    """Red when a row is counted twice or not at all, or a metric does not reach /metrics."""
    penalised = cases_of(server, 2, frequency_penalty=0.5)
    generate_all(server.url, penalised)
    samples, state = settled(server)
    plain = samples["plain_decode_rounds_total"]
    assert set(plain) <= set(PLAIN_CAUSES)
    assert plain == state["plain_decode"]
    (rounds,) = samples["rounds_total"].values()
    (hits,) = samples["hits_total"].values()
    (misses,) = samples["misses_total"].values()
    assert hits + misses + sum(plain.values()) == rounds == state["rows"]
    assert hits == state["hits"] > 0
    assert samples["accept_length_count"][""] == rounds
    assert samples["accept_length_sum"][""] == rounds + state["correct_drafts"]
    for name in ("round", "verify", "reply_wait"):
        assert samples[f"{name}_seconds_count"][""] == state["rounds"]
        assert samples[f"{name}_seconds_sum"][""] <= samples["round_seconds_sum"][""]
    assert samples["drafter_memory_bytes"]["resident"] > 1 << 28
    assert samples["degraded"] == {"": 0}
    shown = {name for metric in METRICS for name in metric.sample_names}
    assert {PREFIX + name for name in samples} == shown


def test_sglangs_own_numbers_agree(server: Server) -> None:
    """Red when the accept lengths that SGLang reports are not those of the rounds."""
    answers = generate_all(server.url, cases_of(server, 2), concurrency=1)
    for answer in answers:
        meta = answer.meta_info
        assert meta["spec_num_correct_drafts"] <= meta["spec_verify_ct"] * 4
        assert meta["spec_accept_length"] == pytest.approx(24 / meta["spec_verify_ct"])


def test_the_log_line_appears(server: Server) -> None:
    """Red when the interval line is lost or stops parsing."""
    lines = re.findall(r"SSD rounds, #round: (\d+), #row: (\d+), #hit: (\d+)", server.log_text())
    assert len(lines) >= 2
    assert all(int(rounds) == 8 for rounds, _, _ in lines)


def test_a_plain_server_exports_nothing_of_ours(target: Path, reference_pool: ServerPool) -> None:
    """Red when a server without speculation gets our metrics beside its own."""
    plain = reference_pool.get(ServerSpec(model=str(target), flags=("--enable-metrics",)))
    generate_all(plain.url, cases_of(plain, 1))
    answer = http.get(f"{plain.url}/metrics", timeout=30)
    assert answer.ok
    assert "sglang:" in answer.text
    assert PREFIX not in answer.text
