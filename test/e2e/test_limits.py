"""A server at its limits: K = 16, a short context, few rows, forced retraction, preemption.

SGLANG_TEST_RETRACT retracts running requests every few forwards, in every test but that of
preemption, which has a server of its own: there every retraction is one.
"""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests as http

from harness.client import Request, generate, generate_all, stream
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import Server, ServerPool, ServerSpec

CONTEXT = 128
NUM_STEPS = 16
MAX_RUNNING = 3


FLAGS = (
    *("--context-length", str(CONTEXT)),
    *("--max-running-requests", str(MAX_RUNNING)),
    *("--max-total-tokens", "1024"),
    *("--chunked-prefill-size", "32"),
    "--enable-priority-scheduling",
    *("--grammar-backend", "none"),
)


@pytest.fixture
def server(pool: ServerPool, spec_for: Any) -> Server:
    env = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "7"))
    return pool.get(spec_for("self", num_steps=NUM_STEPS, flags=FLAGS, env=env))


def long_prompt(server: Server, length: int) -> tuple[int, ...]:
    ids = [token for prompt in load_prompts(server.spec.model, 12) for token in prompt.input_ids]
    return tuple(ids[length : 2 * length])


def test_to_the_end_of_the_context(server: Server, reference: Reference) -> None:
    """Red when the last rounds write into a neighbour's row, or stop a token early or late.

    The distance to the end takes every value modulo K + 1, with neighbours in the batch.
    """
    lengths = range(CONTEXT - 40, CONTEXT - 40 + NUM_STEPS + 1)
    cases = [
        Request(
            long_prompt(server, length), {"max_new_tokens": CONTEXT - length, "ignore_eos": True}
        )
        for length in lengths
    ]
    answers = generate_all(server.url, cases, concurrency=MAX_RUNNING)
    ends = {
        length + len(answer.output_ids) for length, answer in zip(lengths, answers, strict=True)
    }
    assert len(ends) == 1, f"every request ends at the same length: {ends}"
    as_long = [
        Request(case.prompt, {"max_new_tokens": len(answer.output_ids), "ignore_eos": True})
        for case, answer in zip(cases, answers, strict=True)
    ]
    assert_same(reference, as_long, answers)
    assert sum(answer.num_correct_drafts for answer in answers) > 0


def test_to_the_end_of_the_pool(
    pool: ServerPool, reference_pool: ServerPool, spec_for: Any, target: Path
) -> None:
    """Red when a round's reserve is taken from what a request may fill, and it is aborted."""
    flags = ("--context-length", str(CONTEXT), "--max-total-tokens", str(CONTEXT))
    plain = Reference(reference_pool, ServerSpec(model=str(target), flags=flags))
    server = pool.get(spec_for("self", num_steps=NUM_STEPS, flags=flags))
    params = {"max_new_tokens": 60, "ignore_eos": True}
    prompts = [long_prompt(server, CONTEXT - room) for room in (6, 7, 12, 24, 25, 40)]
    cases = [Request(prompt, params) for prompt in prompts]
    answers = [generate(server.url, case) for case in cases]
    assert_same(plain, cases, answers)
    assert [len(answer.output_ids) for answer in answers] == [4, 5, 10, 22, 23, 38]
    too_long = Request(long_prompt(server, CONTEXT - 5), params).body()
    refused = [
        http.post(f"{one.url}/generate", json=too_long, timeout=120)
        for one in (server, plain.server)
    ]
    assert refused[0].status_code == refused[1].status_code == 400
    assert refused[0].json()["error"] == refused[1].json()["error"]


def test_retracted_requests_go_on(server: Server, reference: Reference) -> None:
    """Red when a retracted request loses a token, or its sequence stays with the drafter."""
    cases = [
        Request(prompt.input_ids[:40], {"max_new_tokens": 60, "ignore_eos": True})
        for prompt in load_prompts(server.spec.model, 6)
    ]
    assert_same(reference, cases, generate_all(server.url, cases, concurrency=6))
    retracted = re.findall(r"Testing retraction\. #retracted_reqs: (\d+)", server.log_text())
    assert sum(map(int, retracted)) > 0
    time.sleep(1)
    assert server.ssd()["live_sequences"] == 0


def test_without_grammars_a_constrained_request_fails_alone(
    server: Server, reference: Reference
) -> None:
    """Red when a request that SGLang aborts before its prefill is mirrored, or disturbs others."""
    (prompt,) = load_prompts(server.spec.model, 1)
    plain = Request(prompt.input_ids[:40], {"max_new_tokens": 24})
    with ThreadPoolExecutor(1) as clients:
        beside = clients.submit(stream, server.url, plain)
        body = Request(prompt.input_ids, {"max_new_tokens": 8, "regex": "a+"}).body()
        answer = http.post(f"{server.url}/generate", json=body, timeout=120)
        assert answer.status_code == 400
        assert "--grammar-backend none" in answer.text
        assert_same(reference, [plain], [beside.result().answer])
    time.sleep(1)
    assert server.ssd()["live_sequences"] == 0


def test_preempted_requests_go_on(pool: ServerPool, reference: Reference, spec_for: Any) -> None:
    """Red when a preempted request loses a token, or is not preempted at all."""
    server = pool.get(spec_for("noisy", num_steps=NUM_STEPS, flags=FLAGS))
    prompts = load_prompts(server.spec.model, MAX_RUNNING + 2)
    params = {"max_new_tokens": 80, "ignore_eos": True}
    low = [Request(p.input_ids[:30], params, {"priority": 0}) for p in prompts[:MAX_RUNNING]]
    high = [
        Request(p.input_ids[:30], {"max_new_tokens": 16}, {"priority": 100})
        for p in prompts[MAX_RUNNING:]
    ]
    running = threading.Barrier(MAX_RUNNING + 1, timeout=120)

    def tell(num_chunks: int) -> None:
        if num_chunks == 1:
            running.wait()

    with ThreadPoolExecutor(MAX_RUNNING) as clients:
        futures = [clients.submit(stream, server.url, case, on_chunk=tell) for case in low]
        running.wait()
        urgent = generate_all(server.url, high)
        answers = [future.result().answer for future in futures]
    plain = [Request(case.prompt, case.params) for case in [*low, *high]]
    assert_same(reference, plain, [*answers, *urgent])
    assert sum(answer.meta_info["num_retractions"] for answer in answers) > 0
    assert not any(answer.meta_info["num_retractions"] for answer in urgent)
    assert sum(answer.num_correct_drafts for answer in answers) > 0
    time.sleep(1)
    assert server.ssd()["live_sequences"] == 0
