"""A server at its limits: K = 16, a short context, few rows, forced retraction, preemption.

SGLANG_TEST_RETRACT retracts running requests every few forwards on a server of its own. Everything
holds with overlap scheduling and without; the references have none.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests as http
import torch

from harness.checkpoints import make_drafter
from harness.client import Answer, Request, generate, generate_all, stream
from harness.drafter_faults import reload
from harness.draws import assert_same_draws, without_drafts
from harness.idle import assert_drained
from harness.logprobs import assert_same_logprobs
from harness.processors import serialized
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same, plain_reference
from harness.server import SCHEDULES, Server, ServerPool, ServerSpec

CONTEXT = 128
NUM_STEPS = 16
MAX_RUNNING = 3


LIMITS = (
    *("--context-length", str(CONTEXT)),
    *("--max-running-requests", str(MAX_RUNNING)),
    *("--max-total-tokens", "1024"),
    *("--chunked-prefill-size", "32"),
    "--enable-priority-scheduling",
)
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.3}
DRAWN = {"temperature": 0.9, "top_p": 0.95}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [28, 260]}
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "penalties": (PENALTIES, {}),
    "repetition": ({"repetition_penalty": 1.2}, {}),
    "shortest and bias": ({"min_new_tokens": 50, "logit_bias": {"28": -4.0, "260": 1.5}}, {}),
    "regex": ({"regex": "( [a-z]+){30,}"}, {}),
    "logprobs": ({}, LOGPROBS),
    "penalised logprobs": (PENALTIES, LOGPROBS),
    "hidden states": ({}, {"return_hidden_states": True}),
    "processor": (
        {"custom_params": {"window": 6}},
        {"custom_logit_processor": serialized("BanRecentTokens")},
    ),
    "drawn": (DRAWN, {}),
    "drawn with penalties": (DRAWN | PENALTIES | {"repetition_penalty": 1.2}, {}),
}
"""Sampling parameters and other fields of what is retracted, each by its name."""
MAX_PASSES = 12
MAX_HIDDEN_DIFFERENCE = 1e-3


@pytest.fixture(scope="module", params=SCHEDULES.values(), ids=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Any:
    """The settings for it."""
    return request.param


@pytest.fixture
def server(pool: ServerPool, spec_for: Any, schedule: Any) -> Server:
    return pool.get(spec_for("self", num_steps=NUM_STEPS, flags=LIMITS, settings=schedule))


@pytest.fixture(scope="module")
def limited(target: Path, reference_pool: ServerPool) -> Reference:
    """The server without speculation at the same limits."""
    return plain_reference(reference_pool, target, LIMITS)


@pytest.fixture
def retracting(spec_for: Any, schedule: Any) -> ServerSpec:
    """A K with which there are rounds enough to be retracted between."""
    env = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "5"))
    flags = (*LIMITS, "--enable-return-hidden-states")
    spec: ServerSpec = spec_for("self", num_steps=4, flags=flags, settings=schedule, env=env)
    return spec


@pytest.fixture
def preempting_server(pool: ServerPool, spec_for: Any, schedule: Any) -> Server:
    """Its retractions are preemptions; it has no grammars."""
    flags = (*LIMITS, "--grammar-backend", "none")
    return pool.get(spec_for("noisy", num_steps=NUM_STEPS, flags=flags, settings=schedule))


def long_prompt(server: Server, length: int) -> tuple[int, ...]:
    ids = [token for prompt in load_prompts(server.spec.model, 12) for token in prompt.input_ids]
    return tuple(ids[length : 2 * length])


def test_to_the_end_of_the_context(server: Server, limited: Reference) -> None:
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
    assert_same(limited, cases, answers)
    assert sum(answer.num_correct_drafts for answer in answers) > 0


@pytest.mark.timeout(1800)
def test_retracted_requests_go_on(
    retracting: ServerSpec,
    pool: ServerPool,
    reference: Reference,
    drafts_off: Reference,
    target: Path,
    figures: dict[str, Any],
) -> None:
    """Red when a retracted request loses a token, a count, a draw, a state of its grammar or a row
    of what it asked for, or its sequence stays with the drafter. Under overlap SGLang drops its
    last round.

    With the drafter of the same weights, then with one that is right at times: one server, whose
    drafter is exchanged.
    """
    server = pool.take(retracting)
    try:
        for kind in ("self", "noisy"):
            if kind != "self":
                answer = reload(server, model_path=str(make_drafter("noisy", target)))
                assert answer.status_code == 200, answer.text
            figures[kind] = assert_goes_on_when_retracted(server, reference, drafts_off)
            assert_drained(server)
    finally:
        server.stop()


def assert_goes_on_when_retracted(
    server: Server, reference: Reference, drafts_off: Reference
) -> dict[str, int]:
    """The same cases until each has been retracted and had drafts; how often each was retracted."""
    cases = retracted_cases(server.spec.model)
    retractions, num_correct = dict.fromkeys(cases, 0), dict.fromkeys(cases, 0)
    order, rng = list(cases), random.Random(0)
    for _ in range(MAX_PASSES):
        rng.shuffle(order)  # the one that is least far is retracted
        found = generate_all(server.url, [cases[name] for name in order], concurrency=6)
        answers = dict(zip(order, found, strict=True))
        for name, answer in answers.items():
            retractions[name] += answer.meta_info["num_retractions"]
            num_correct[name] += answer.num_correct_drafts
        assert_same_under_retraction(server, reference, drafts_off, cases, answers)
        if all(retractions.values()) and all(num_correct.values()):
            return retractions
    raise AssertionError(f"retractions {retractions}, correct drafts {num_correct}")


def retracted_cases(model: str) -> dict[str, Request]:
    common = {"max_new_tokens": 60, "ignore_eos": True}
    cases = {}
    for index, (name, (params, options)) in enumerate(RULES.items()):
        seed = {"sampling_seed": 900 + index} if "temperature" in params else {}
        prompt = load_prompts(model, len(RULES))[index].input_ids[:40]
        cases[name] = Request(prompt, {**common, **params, **seed}, options)
    return cases


def assert_same_under_retraction(
    server: Server,
    reference: Reference,
    drafts_off: Reference,
    cases: dict[str, Request],
    answers: dict[str, Answer],
) -> None:
    drawn = [name for name, case in cases.items() if "sampling_seed" in case.params]
    assert_same_draws(drafts_off, [cases[n] for n in drawn], [answers[n] for n in drawn])
    greedy = [name for name in cases if name not in drawn and name != "hidden states"]
    chosen = [cases[name] for name in greedy]
    assert_same(reference, chosen, [answers[name] for name in greedy])
    for name, want in zip(greedy, reference.answers(chosen), strict=True):
        assert_same_logprobs(want, answers[name], side="output")
    # Alone, a request is never retracted, and this server is the one that gives hidden states.
    (plainly,) = without_drafts([cases["hidden states"]])
    assert_same_states(generate(server.url, plainly), answers["hidden states"])


def assert_same_states(want: Answer, have: Answer) -> None:
    """A prefill's entry has the rows of what it read, the last one of which gave a token."""
    assert have.output_ids == want.output_ids
    expected, got = (one.meta_info["hidden_states"] for one in (want, have))
    assert len(got) == len(expected) == len(have.output_ids)
    for a, b in zip(expected, got, strict=True):
        rows = [torch.tensor(entry).reshape(-1, torch.tensor(entry).shape[-1]) for entry in (a, b)]
        assert float((rows[0][-1] - rows[1][-1]).abs().max()) < MAX_HIDDEN_DIFFERENCE


def test_to_the_end_of_the_pool(
    pool: ServerPool, reference_pool: ServerPool, spec_for: Any, schedule: Any, target: Path
) -> None:
    """Red when a round's reserve is taken from what a request may fill, and it is aborted."""
    flags = ("--context-length", str(CONTEXT), "--max-total-tokens", str(CONTEXT))
    plain = Reference(reference_pool, ServerSpec(model=str(target), flags=flags))
    server = pool.get(spec_for("self", num_steps=NUM_STEPS, flags=flags, settings=schedule))
    cases = [
        Request(long_prompt(server, CONTEXT - room), {"max_new_tokens": room, "ignore_eos": True})
        for room in (7, 8, 12, 24, 25, 40)
    ]
    answers = [generate(server.url, case) for case in cases]
    assert_same(plain, cases, answers)
    assert [len(answer.output_ids) for answer in answers] == [5, 6, 10, 22, 23, 38]
    too_long = Request(long_prompt(server, CONTEXT - 6), {"max_new_tokens": 6}).body()
    refused = [
        http.post(f"{one.url}/generate", json=too_long, timeout=120)
        for one in (server, plain.server)
    ]
    assert refused[0].status_code == refused[1].status_code == 400
    assert refused[0].json()["error"] == refused[1].json()["error"]


def test_without_grammars_a_constrained_request_fails_alone(
    preempting_server: Server, reference: Reference
) -> None:
    """Red when a request that SGLang aborts before its prefill is mirrored, or disturbs others."""
    (prompt,) = load_prompts(preempting_server.spec.model, 1)
    plain = Request(prompt.input_ids[:40], {"max_new_tokens": 24})
    with ThreadPoolExecutor(1) as clients:
        beside = clients.submit(stream, preempting_server.url, plain)
        body = Request(prompt.input_ids, {"max_new_tokens": 8, "regex": "a+"}).body()
        answer = http.post(f"{preempting_server.url}/generate", json=body, timeout=120)
        assert answer.status_code == 400
        assert "--grammar-backend none" in answer.text
        assert_same(reference, [plain], [beside.result().answer])
    time.sleep(1)
    assert preempting_server.ssd()["live_sequences"] == 0


def test_preempted_requests_go_on(preempting_server: Server, reference: Reference) -> None:
    """Red when a preempted request loses a token or a count, or is not preempted at all."""
    server = preempting_server
    prompts = load_prompts(server.spec.model, MAX_RUNNING + 2)
    params = {"max_new_tokens": 80, "ignore_eos": True, **PENALTIES}
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
