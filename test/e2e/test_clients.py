"""The clients that people use, unchanged, against a server with SSD on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from harness.benchmark import bench_serving
from harness.client import Request, generate
from harness.frontend import CITIES, introduce, run_batch, run_streamed, tour
from harness.reference import Reference
from harness.server import Server, ServerPool

MESSAGES: Any = [{"role": "user", "content": "Name three rivers of Europe."}]


@pytest.fixture
def server(pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for("self"))


def _client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def _chat(server: Server, **options: Any) -> Any:
    return _client(server).chat.completions.create(
        model="default", messages=MESSAGES, temperature=0, max_tokens=40, **options
    )


def test_openai_chat(server: Server, reference: Reference) -> None:
    """Red when the text, the stop or the usage of a chat answer is not the target's."""
    expected, got = _chat(reference.server), _chat(server)
    assert got.choices[0].message.content == expected.choices[0].message.content
    assert got.choices[0].finish_reason == expected.choices[0].finish_reason
    assert got.usage.completion_tokens == expected.usage.completion_tokens


def test_openai_chat_streamed(server: Server, reference: Reference) -> None:
    """Red when the pieces of a stream do not join to the whole answer."""
    whole = _chat(reference.server).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in _chat(server, stream=True)]
    assert "".join(pieces) == whole
    assert len(pieces) > 3


def test_openai_completion_with_logprobs(server: Server, reference: Reference) -> None:
    """Red when a completion's logprobs lose tokens of a run."""

    def ask(which: Server) -> Any:
        return _client(which).completions.create(
            model="default",
            prompt="The three primary colours are",
            temperature=0,
            max_tokens=16,
            logprobs=2,
        )

    expected, got = ask(reference.server).choices[0], ask(server).choices[0]
    assert got.text == expected.text
    assert got.logprobs.tokens == expected.logprobs.tokens
    assert got.logprobs.token_logprobs == pytest.approx(expected.logprobs.token_logprobs, abs=1e-3)


def test_frontend_program(server: Server, reference: Reference) -> None:
    """Red when a scoring request opens a sequence, or forks of one prefix disturb each other."""

    def run(which: Server) -> list[dict[str, Any]]:
        states = run_batch(tour, which, CITIES[:3])
        return [{"text": s.text(), **{k: s[k] for k in ("intro", "year", "large")}} for s in states]

    got = run(server)
    assert got == run(reference.server)
    assert all(re.fullmatch(r"[12][0-9]{3}", state["year"]) for state in got)


def test_frontend_program_streamed(server: Server, reference: Reference) -> None:
    """Red when the pieces that a streaming program sees do not join to what it holds at the end."""
    have, want = (run_streamed(introduce, one, CITIES[0]) for one in (server, reference.server))
    assert have.text() == want.text()


def test_stock_serving_benchmark(server: Server, tmp_path: Path, figures: dict[str, Any]) -> None:
    """Red when SGLang's own benchmark cannot run against the server or finds no accept length."""
    accept_length, _ = bench_serving(server, tmp_path, num_prompts=6, num_tokens=24)
    figures["accept_length"] = accept_length
    assert accept_length > 3


def test_request_errors_are_sglangs_own(server: Server, reference: Reference) -> None:
    """Red when a bad request is answered unlike the plain server does, or hurts a good one."""
    import requests as http

    bad: list[dict[str, Any]] = [
        {"text": "x", "sampling_params": {"temperature": -1.0}},
        {"text": "x", "sampling_params": {"top_p": 2.0}},
        {"text": "x", "sampling_params": {"max_new_tokens": -1}},
        {"input_ids": [5] * 3000, "sampling_params": {"max_new_tokens": 4}},
        {"text": "x", "sampling_params": {"json_schema": "{", "max_new_tokens": 4}},
        {"text": "x", "sampling_params": {"logit_bias": {"99999999": 1.0}, "max_new_tokens": 4}},
    ]
    for body in bad:
        expected, got = (
            http.post(f"{which.url}/generate", json=body, timeout=60)
            for which in (reference.server, server)
        )
        assert got.status_code == expected.status_code, body
        if got.status_code != 200:
            assert _message(got) == _message(expected)
    assert generate(server.url, Request("Still here?", {"max_new_tokens": 4})).output_ids


def _message(reply: Any) -> Any:
    error = reply.json().get("error", {})
    return error.get("message") if isinstance(error, dict) else error
