"""FR-14: constrained answers keep to their grammars; a broken grammar costs its own request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests as http

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all, openai
from harness.grammars import (
    BROKEN,
    CONSTRAINTS,
    SCHEMA,
    TAG_AFTER_TRIGGER,
    TAG_AT_ONCE,
    TRIGGER_BIAS,
    assert_keeps_to,
    without_clock,
)
from harness.prompts import cycle_prompts, encode, load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafted, assert_drafting
from harness.server import Server
from harness.size import Size

NUM_PROMPTS = 40
"""Of the file."""


def constraint_of(index: int) -> dict[str, str]:
    """Of every other request; a prompt that comes again gets another one."""
    if index % 2 == 0:
        return {}
    return CONSTRAINTS[(index // 2 + index // NUM_PROMPTS) % len(CONSTRAINTS)]


def test_fr_14(kind: DrafterKind, server: Server, reference: Reference, size: Size) -> None:
    """Red when a mask is made of a grammar that has ended, or a draft that it forbids is accepted,
    or a neighbour is masked."""
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": 40, **constraint_of(index)})
        for index, prompt in enumerate(cycle_prompts(server.spec.model, size.num_constrained))
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=6)
    assert len(answers) == size.num_constrained
    rounds = counter.since()
    assert_drafting(kind, rounds)
    assert_same(reference, cases, answers)
    for case, answer in zip(cases, answers, strict=True):
        if answer.finish["type"] == "stop":
            assert_keeps_to(case.params, answer.text)
    assert_drafted(kind, answers[::2])
    assert rounds.on_time_rows > 0


def test_fr_14_tags(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when a tag's grammar is advanced over drafts that are not taken back, or is entered late,
    or a neighbour pays, or a request with one has no drafts."""
    (trigger,) = encode(server.spec.model, "<")
    tags: tuple[dict[str, Any], ...] = (
        {"structural_tag": TAG_AT_ONCE},
        {"structural_tag": TAG_AFTER_TRIGGER, "logit_bias": {str(trigger): TRIGGER_BIAS}},
    )
    params = [*tags, {}] * 2
    prompts = load_prompts(server.spec.model, len(params))
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": 40, **one})
        for prompt, one in zip(prompts, params, strict=True)
    ]
    tagged = [case for case in cases if "structural_tag" in case.params]
    assert_same(reference, cases, generate_all(server.url, cases, concurrency=len(cases)))
    counter = RoundCounter(server)
    answers = generate_all(server.url, tagged, concurrency=len(tagged))
    assert_drafting(kind, counter.since())
    assert_same(reference, tagged, answers)
    assert all(answer.text.startswith("<a>") for answer in answers)


def test_fr_14_response_format(server: Server, reference: Reference) -> None:
    """Red when the OpenAI form of a schema is another one, or fails after some requests."""
    schema = {"name": "city", "schema": json.loads(SCHEMA)}
    body = {
        "messages": [{"role": "user", "content": "A city as JSON, please."}],
        "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    (want,) = openai(reference.server.url, "chat/completions", body)["choices"]
    for _ in range(4):
        (have,) = openai(server.url, "chat/completions", body)["choices"]
        assert have["message"]["content"] == want["message"]["content"]
        assert have["finish_reason"] == want["finish_reason"]


def reason(answer: http.Response) -> str:
    return without_clock(answer.json()["error"]["message"])


def test_fr_14_broken_grammars(server: Server, reference: Reference) -> None:
    """Red when a grammar that does not compile takes a neighbour, or the scheduler, with it."""
    plain = [
        Request(p.input_ids, {"max_new_tokens": 24}) for p in load_prompts(server.spec.model, 2)
    ]
    with ThreadPoolExecutor(1) as clients:
        beside = clients.submit(generate_all, server.url, plain)
        for broken in BROKEN:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 8, **broken}}
            want, have = (
                http.post(f"{one.url}/generate", json=body, timeout=120)
                for one in (reference.server, server)
            )
            assert have.status_code == want.status_code == 400
            assert reason(have) == reason(want)
        assert_same(reference, plain, beside.result())
