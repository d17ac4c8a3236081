"""FR-14: constrained answers keep to their grammars; a broken grammar costs its own request."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import requests as http

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all, openai
from harness.grammars import BROKEN, CONSTRAINTS, SCHEMA, assert_keeps_to
from harness.prompts import cycle_prompts, load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafted
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
    assert_same(reference, cases, answers)
    for case, answer in zip(cases, answers, strict=True):
        if answer.finish["type"] == "stop":
            assert_keeps_to(case.params, answer.text)
    assert_drafted(kind, answers[::2])
    assert counter.since().on_time_rows > 0


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
    """The message, without the time of day that the compiler of grammars puts into it."""
    return re.sub(r"\[[0-9:]{8}\] ", "", answer.json()["error"]["message"])


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
