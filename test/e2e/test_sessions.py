"""Turns of a session say what one request with the whole conversation would."""

from __future__ import annotations

from typing import Any

import pytest
import requests as http

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate
from harness.idle import assert_drained
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import OVERLAP, Server, ServerPool

NUM_TOKENS = 11


@pytest.fixture(
    scope="module",
    params=[("self", OVERLAP), ("random", ())],
    ids=["self-overlap", "random-no-overlap"],
)
def server(request: pytest.FixtureRequest, pool: ServerPool, spec_for: Any) -> Server:
    kind: DrafterKind
    kind, settings = request.param
    flags = ("--enable-streaming-session",)
    return pool.get(spec_for(kind, flags=flags, settings=settings))


def inputs_of(server: Server) -> list[tuple[int, ...]]:
    """From the middle of prompts: SGLang strips a BOS at the start of a turn."""
    return [tuple(prompt.input_ids[3:28]) for prompt in load_prompts(server.spec.model, 4)]


def open_session(server: Server, *, streaming: bool) -> str:
    body = {"capacity_of_str_len": 4000, "streaming": streaming}
    return str(http.post(f"{server.url}/open_session", json=body, timeout=60).json())


def converse(
    server: Server, inputs: list[tuple[int, ...]], params: dict[str, Any], *, streaming: bool
) -> list[Answer]:
    session = open_session(server, streaming=streaming)
    answers: list[Answer] = []
    for tokens in inputs:
        last = answers[-1].meta_info["id"] if answers else None
        of_session = {"session_params": {"id": session, "rid": None if streaming else last}}
        answers.append(generate(server.url, Request(tokens, params, of_session)))
    http.post(f"{server.url}/close_session", json={"session_id": session}, timeout=60)
    return answers


def assert_as_one_request(
    reference: Reference,
    inputs: list[tuple[int, ...]],
    params: dict[str, Any],
    answers: list[Answer],
) -> None:
    context: tuple[int, ...] = ()
    for tokens, answer in zip(inputs, answers, strict=True):
        context += tokens
        assert_same(reference, [Request(context, params)], [answer])
        context += tuple(answer.output_ids)


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
def test_turns_that_end_by_length(server: Server, reference: Reference, streaming: bool) -> None:
    """Red when a turn reads KV of a bonus that was never computed, or of a rejected draft."""
    inputs = inputs_of(server)
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = converse(server, inputs, params, streaming=streaming)
    assert_as_one_request(reference, inputs, params, answers)
    assert_drained(server)


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
def test_turns_that_end_within_a_run(server: Server, reference: Reference, streaming: bool) -> None:
    """Red when accepted tokens behind a stop become part of the next turn's prompt."""
    inputs = inputs_of(server)[:2]
    free = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    (first,) = reference.answers([Request(inputs[0], free)])
    for stop in dict.fromkeys(first.output_ids[: server.spec.num_steps + 2]):
        params = {"max_new_tokens": NUM_TOKENS, "stop_token_ids": [stop]}
        answers = converse(server, inputs, params, streaming=streaming)
        assert_as_one_request(reference, inputs, params, answers)
