"""The clients that people use, unchanged, against a server with SSD on."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import requests as http
from pydantic import BaseModel

from harness.benchmark import Backend, bench_serving
from harness.client import Request, streamed_beside
from harness.frontend import CITIES, introduce, run_batch, run_streamed, tour
from harness.grammars import SCHEMA, TAG_AT_ONCE
from harness.logprobs import MAX_DIFFERENCE, assert_close
from harness.openai_client import (
    MESSAGES,
    PLAINLY,
    QUESTION,
    TOOL,
    WEATHER,
    async_client_of,
    chat,
    client_of,
    join_chat,
    outcome,
    told_by_chat,
    told_by_completion,
    told_by_responses,
    told_whole,
)
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafted
from harness.server import Server, ServerPool

GREEDY = {"temperature": 0, "max_new_tokens": 4}
NUM_BENCHMARKED = 72
"""Tokens of an answer: enough for whole intervals in which every row has drafts."""


@pytest.fixture
def server(pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for("self"))


def test_openai_chat(server: Server, reference: Reference) -> None:
    """Red when the text, the stop or the usage of a chat answer is not the target's."""
    expected, got = chat(reference.server), chat(server)
    assert got.choices[0].message.content == expected.choices[0].message.content
    assert got.choices[0].finish_reason == expected.choices[0].finish_reason
    assert got.usage.completion_tokens == expected.usage.completion_tokens


def test_openai_chat_streamed(server: Server, reference: Reference) -> None:
    """Red when the pieces of a stream do not join to the whole answer."""
    whole = chat(reference.server).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(server, stream=True)]
    assert "".join(pieces) == whole
    assert len(pieces) > 3


FORMS = [
    pytest.param(False, id="whole"),
    pytest.param(True, id="streamed", marks=pytest.mark.slow),
]
WORDS = "( [a-z]+){9,}"
WORDS_EBNF = 'root ::= (" " [a-z]+)+'
CITY_SCHEMA = {"name": "city", "schema": json.loads(SCHEMA)}
FORCED = {"tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 64}

OPTIONS: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["\n", "."]},
    "logit-bias": {"logit_bias": {"28": -6, "260": 3}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [TOOL]},
    "no-tool": {"tools": [TOOL], "tool_choice": "none"},
    "required-tool": {**FORCED, "tool_choice": "required"},
    "named-tool": {
        **FORCED,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    "schema": {"response_format": {"type": "json_schema", "json_schema": CITY_SCHEMA}},
    "json": {"response_format": {"type": "json_object"}},
    "tag": {"response_format": json.loads(TAG_AT_ONCE)},
    "regex": {"extra_body": {"regex": WORDS}},
    "ebnf": {"extra_body": {"ebnf": WORDS_EBNF}},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "usage": {"stream_options": {"include_usage": True}},
    "seed": {"seed": 7, "temperature": 0.9, "top_p": 0.9},
    "filters": {"seed": 7, "temperature": 0.9, "extra_body": {"top_k": 20, "min_p": 0.02}},
    "copies": {"seed": 7, "temperature": 1.0, "n": 3},
}
"""Of a chat. No parser of tool calls runs here, so a call that is forced is the text of the answer;
test_operator.py has what a parser makes of it."""
MAY_END_AT_ONCE = frozenset({"stop", "json", "tag"})
"""With so few tokens that no draft comes in time."""


@pytest.mark.parametrize("streamed", FORMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_openai_options(name: str, streamed: bool, server: Server, reference: Reference) -> None:
    """Red when an option of the client means something else under speculation, or its request has
    no drafts.

    A server without shared noise draws other tokens from a seed, so a drawn answer is compared with
    that of plain decode on the same server.
    """
    options = OPTIONS[name]
    counter = RoundCounter(server)
    have = told_by_chat(server, streamed=streamed, **options)
    assert name in MAY_END_AT_ONCE or counter.since().drafted_rows > 0
    if "seed" in options:
        plainly = {**options.get("extra_body", {}), **PLAINLY}
        want = told_by_chat(server, streamed=streamed, **{**options, "extra_body": plainly})
    else:
        want = told_by_chat(reference.server, streamed=streamed, **options)
    assert_close(want, have, name)


COMPLETION_OPTIONS: dict[str, dict[str, Any]] = {
    "regex": {"extra_body": {"regex": WORDS}},
    "ebnf": {"extra_body": {"ebnf": WORDS_EBNF}},
    "json-schema": {"extra_body": {"json_schema": SCHEMA}},
    "echo": {"echo": True, "logprobs": 1},
    "several-prompts": {"prompt": ["Once upon a time", "The three primary colours are"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", COMPLETION_OPTIONS)
def test_openai_completion_options(
    name: str, streamed: bool, server: Server, reference: Reference
) -> None:
    """Red when a grammar that the client sends beside its own fields, an echo or a list of prompts
    means something else under speculation, or its request has no drafts."""
    options = COMPLETION_OPTIONS[name]
    counter = RoundCounter(server)
    have = told_by_completion(server, streamed=streamed, **options)
    assert counter.since().drafted_rows > 0
    want = told_by_completion(reference.server, streamed=streamed, **options)
    assert_close(want, have, name)


REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "tool-without-tools": {"tool_choice": "required"},
    "unknown-tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "nobody"}},
    },
    "two-constraints": {
        **{"tools": [TOOL], "tool_choice": "required"},
        "extra_body": {"regex": WORDS},
    },
    "broken-regex": {"extra_body": {"regex": "("}},
    "broken-ebnf": {"extra_body": {"ebnf": "root ::= ("}},
    "broken-tag": {"response_format": {"type": "structural_tag", "structures": "none"}},
}


@pytest.mark.parametrize("streamed", FORMS)
def test_openai_refusals(streamed: bool, server: Server, reference: Reference) -> None:
    """Red when what SGLang refuses of an OpenAI client is served, or refused in other words, or at
    another time of a stream."""
    for name, options in REFUSED_OPTIONS.items():
        want, have = (
            outcome(partial(told_by_chat, one, streamed=streamed, **options))
            for one in (reference.server, server)
        )
        assert have == want, name
        assert have[0] == "refused", name


RESPONSE_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"input": QUESTION},
    "instructions": {"instructions": "Be brief."},
    "turns": {
        "input": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "The Danube."},
            {"role": "user", "content": "And two more?"},
        ]
    },
    "schema": {"text": {"format": {"type": "json_schema", **CITY_SCHEMA}}},
    "penalties": {"extra_body": {"frequency_penalty": 0.5, "presence_penalty": 0.5}},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "required-tool": {
        **{"tools": [{"type": "function", **WEATHER}], "tool_choice": "required"},
        "parallel_tool_calls": False,
    },
    "tool-without-tools": {"tool_choice": "required"},
    "unknown-model": {"model": "nobody"},
    "stored": {"previous_response_id": "resp_of_nobody"},
}
REFUSED_RESPONSES = frozenset({"tool-without-tools", "unknown-model", "stored"})


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", RESPONSE_OPTIONS)
def test_openai_responses(name: str, streamed: bool, server: Server, reference: Reference) -> None:
    """Red when an answer of the client's newer interface, the order of its events, what they join
    to or how it is refused is not the plain server's, or its request has no drafts.

    Its streams have no logprobs, and SGLang says so.
    """
    options = RESPONSE_OPTIONS[name]
    refused = name in REFUSED_RESPONSES or (streamed and name == "logprobs")
    counter = RoundCounter(server)
    kind, have = outcome(partial(told_by_responses, server, streamed=streamed, **options))
    assert (kind == "refused") == refused, have
    assert refused or counter.since().drafted_rows > 0
    want = outcome(partial(told_by_responses, reference.server, streamed=streamed, **options))
    assert_close(want, (kind, have), name)
    if streamed and name == "required-tool":
        assert "response.function_call_arguments.delta" in have["kinds"]


@pytest.mark.slow
def test_openai_async(server: Server, reference: Reference) -> None:
    """Red when answers that one asynchronous client awaits together, some of them in pieces, get
    each other's tokens, or none."""

    async def ask_all(which: Server) -> list[Any]:
        async with async_client_of(which) as client:

            async def ask(length: int) -> dict[str, Any]:
                options = {"model": "default", "messages": MESSAGES, "temperature": 0}
                answer = await client.chat.completions.create(
                    **options,  # type: ignore[arg-type]
                    stream=length % 2 == 0,
                    max_tokens=length,
                    extra_body={"ignore_eos": True},
                )
                if length % 2 == 0:
                    return join_chat([chunk async for chunk in answer])
                return told_whole(answer)

            return await asyncio.gather(*map(ask, range(20, 28)))

    counter = RoundCounter(server)
    have = asyncio.run(ask_all(server))
    assert counter.since().drafted_rows > 0
    assert_close(asyncio.run(ask_all(reference.server)), have, "answers")


def test_openai_usage_at_the_end_of_a_stream(server: Server, reference: Reference) -> None:
    """Red when the tokens of a run are counted as one, or the chunk of usage does not come."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    want, have = (
        [chunk.usage for chunk in chat(one, **options) if chunk.usage is not None][-1]
        for one in (reference.server, server)
    )
    assert have.completion_tokens == want.completion_tokens
    assert have.prompt_tokens == want.prompt_tokens


def test_openai_completion_with_logprobs(server: Server, reference: Reference) -> None:
    """Red when a completion's logprobs lose tokens of a run."""

    def ask(which: Server) -> Any:
        return client_of(which).completions.create(
            model="default",
            prompt="The three primary colours are",
            temperature=0,
            max_tokens=16,
            logprobs=2,
        )

    expected, got = ask(reference.server).choices[0], ask(server).choices[0]
    assert got.text == expected.text
    assert got.logprobs.tokens == expected.logprobs.tokens
    assert got.logprobs.token_logprobs == pytest.approx(
        expected.logprobs.token_logprobs, abs=MAX_DIFFERENCE
    )


@pytest.mark.slow
def test_openai_completion_streamed(server: Server, reference: Reference) -> None:
    """Red when the pieces of a streamed completion, or their logprobs, do not join to the whole."""
    options = {"model": "default", "prompt": "The three primary colours are", "logprobs": 1}
    options |= {"temperature": 0, "max_tokens": 24}
    whole = client_of(reference.server).completions.create(**options).choices[0]
    chunks = client_of(server).completions.create(stream=True, **options)
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish_reason == whole.finish_reason
    told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert [token for one in told for token in one.tokens] == whole.logprobs.tokens
    logprobs = [logprob for one in told for logprob in one.token_logprobs]
    assert logprobs == pytest.approx(whole.logprobs.token_logprobs, abs=MAX_DIFFERENCE)


@pytest.mark.slow
def test_openai_models(server: Server, reference: Reference) -> None:
    """Red when the client finds other models than on the plain server, or none."""
    want, have = (
        [(model.id, model.root, model.max_model_len) for model in client_of(one).models.list()]
        for one in (reference.server, server)
    )
    assert have == want != []


class City(BaseModel):
    old: bool
    continent: Literal["Europe", "Africa", "Asia"]


@pytest.mark.slow
def test_openai_parse(server: Server, reference: Reference) -> None:
    """Red when the client's own schema of a class is not kept to, or is filled otherwise."""

    def ask(which: Server) -> Any:
        chat = client_of(which).chat.completions.parse(
            model="default",
            messages=[{"role": "user", "content": "Where is Rome? Answer in JSON."}],
            response_format=City,
            temperature=0,
            max_tokens=100,
        )
        return chat.choices[0].message

    want, have = ask(reference.server), ask(server)
    assert have.content == want.content
    assert isinstance(have.parsed, City)


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


@pytest.mark.parametrize(
    ("backend", "streamed"),
    [
        pytest.param("sglang", True, id="generate"),
        pytest.param("sglang", False, id="generate-whole", marks=pytest.mark.slow),
        pytest.param("sglang-oai", True, id="completions", marks=pytest.mark.slow),
        pytest.param("sglang-oai", False, id="completions-whole", marks=pytest.mark.slow),
        pytest.param("sglang-oai-chat", True, id="chat", marks=pytest.mark.slow),
        pytest.param("sglang-oai-chat", False, id="chat-whole", marks=pytest.mark.slow),
    ],
)
def test_stock_serving_benchmark(
    backend: Backend, streamed: bool, server: Server, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """Red when SGLang's own benchmark cannot run against the server or finds no accept length.

    What it finds is of all that the server did since its start.
    """
    counter = RoundCounter(server)
    accept_length, found = bench_serving(
        server,
        tmp_path,
        num_prompts=6,
        num_tokens=NUM_BENCHMARKED,
        backend=backend,
        streamed=streamed,
    )
    figures.update(counter.since().summary())
    assert accept_length > 1
    assert figures["accept_length"] > 3
    assert found["completed"] == 6
    assert found["total_output_tokens"] == 6 * NUM_BENCHMARKED


BENCHMARK_MODES: dict[str, tuple[str, ...]] = {
    "request-rate": ("--request-rate", "3"),
    "logprobs": ("--return-logprob", "--top-logprobs-num", "2", "--logprob-start-len", "0"),
    "shared-prefix": (
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2"),
        *("--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "48"),
        *("--gsp-question-len", "16", "--gsp-output-len", str(NUM_BENCHMARKED)),
        "--gsp-send-routing-key",  # or its prompts come from a file that an earlier run left
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", BENCHMARK_MODES)
def test_modes_of_the_stock_serving_benchmark(mode: str, server: Server, tmp_path: Path) -> None:
    """Red when arrivals one by one, logprobs or shared prefixes cost requests, tokens or drafts."""
    counter = RoundCounter(server)
    _, found = bench_serving(
        server,
        tmp_path,
        num_prompts=6,
        num_tokens=NUM_BENCHMARKED,
        flags=BENCHMARK_MODES[mode],
    )
    assert found["completed"] == 6, found["errors"]
    assert found["total_output_tokens"] == 6 * NUM_BENCHMARKED
    assert counter.since().summary()["accept_length"] > 3


MALFORMED: tuple[tuple[str, Any], ...] = (
    ("generate", {"text": "x", "sampling_params": {"temperature": -1.0}}),
    ("generate", {"text": "x", "sampling_params": {"top_p": 2.0}}),
    ("generate", {"text": "x", "sampling_params": {"max_new_tokens": -1}}),
    ("generate", {"input_ids": [5] * 3000, "sampling_params": GREEDY}),
    ("generate", {"text": "x", "sampling_params": {**GREEDY, "json_schema": "{"}}),
    ("generate", {"text": "x", "sampling_params": {**GREEDY, "logit_bias": {"99999999": 1.0}}}),
    ("generate", {"sampling_params": GREEDY}),
    ("generate", {"text": "x", "input_ids": [5], "sampling_params": GREEDY}),
    ("generate", {"text": 5, "sampling_params": GREEDY}),
    ("generate", {"input_ids": ["five"], "sampling_params": GREEDY}),
    (
        "generate",
        {
            "text": "x",
            "sampling_params": GREEDY,
            "return_logprob": True,
            "token_ids_logprob": [99999999],
        },
    ),
    ("generate", "{"),
    ("generate", "[]"),
    ("v1/completions", "{"),
    ("v1/completions", {"model": "any"}),
    ("v1/completions", {"model": "any", "prompt": "x", "temperature": "hot"}),
    ("v1/completions", {"model": "any", "prompt": "x", "max_tokens": -1}),
    ("v1/completions", {"model": "any", "prompt": "x", "max_tokens": 4, "top_p": 2}),
    ("v1/completions", {"model": "any", "prompt": "x", "max_tokens": 4000}),
    ("v1/chat/completions", "not json"),
    ("v1/chat/completions", {"model": "any"}),
    ("v1/chat/completions", {"model": "any", "messages": "hello"}),
    ("v1/chat/completions", {"model": "any", "messages": []}),
    ("v1/chat/completions", {"model": "any", "messages": [{"role": "king", "content": "x"}]}),
    ("v1/chat/completions", {"model": "any", "messages": MESSAGES, "temperature": -1}),
    ("v1/chat/completions", {"model": "any", "messages": MESSAGES, "tool_choice": "perhaps"}),
    (
        "v1/chat/completions",
        {"model": "any", "messages": MESSAGES, "response_format": {"type": "poem"}},
    ),
    ("v1/responses", {"model": "any"}),
    ("v1/responses", {"input": "x", "temperature": "hot"}),
    ("v1/responses", {"input": "x", "tool_choice": "required"}),
    ("v1/responses", {"input": "x", "max_output_tokens": 6, "top_p": 2}),
    ("v1/messages", {"model": "any", "messages": MESSAGES}),
    ("v1/messages", {"model": "any", "max_tokens": 0, "messages": MESSAGES}),
    ("v1/messages", {"model": "any", "max_tokens": 4, "messages": [{"role": "king"}]}),
    ("v1/messages", {"model": "any", "max_tokens": 4, "messages": MESSAGES, "temperature": -1}),
)
"""Path and body; a text is sent as it is, an object once more with `stream`. A few are served by
SGLang all the same."""


def test_request_errors_are_sglangs_own(server: Server, reference: Reference) -> None:
    """Red when a bad request, streamed or not, is answered unlike the plain server does, or hurts a
    good one that runs meanwhile."""
    good = Request("Still here?", {"max_new_tokens": 60, "ignore_eos": True})
    with streamed_beside(server.url, [good]) as beside:
        for path, body in MALFORMED:
            for sent in (body,) if isinstance(body, str) else (body, {**body, "stream": True}):
                expected, got = (_refused(one, path, sent) for one in (reference.server, server))
                assert got.status_code == expected.status_code, (path, sent, got.text)
                assert _said(got) == _said(expected), (path, sent)
    assert_same(reference, *zip(*beside, strict=True))
    assert_drafted("self", [answer for _, answer in beside])


def _refused(which: Server, path: str, body: Any) -> Any:
    sent = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    return http.post(f"{which.url}/{path}", data=sent, headers=headers, timeout=60)


def _said(reply: Any) -> Any:
    """All of a refusal, or the answer of what was served all the same."""
    if reply.status_code != 200:
        assert reply.text
        return reply.text
    if reply.headers["Content-Type"].startswith("text/event-stream"):
        return _said_in_pieces(reply)
    found = reply.json()
    if "text" in found:
        return found["text"], found["meta_info"]["finish_reason"]
    return found["choices"]


def _said_in_pieces(reply: Any) -> Any:
    """The first piece, if it tells of an error; of others which fields it has, for their ids and
    times are others every time, and the errors behind it."""
    pieces = [json.loads(piece) for piece in re.findall(r"^data: (\{.*)$", reply.text, re.M)]
    if "error" in pieces[0]:
        return pieces[0]
    errors = [piece.get("error") or piece.get("response", {}).get("error") for piece in pieces]
    return sorted(pieces[0]), [error for error in errors if error]
