"""Every row of docs/sampling.md, walked: what speculates does, what is refused is refused by name.

The table must name each field of SGLang's SamplingParams, of GenerateReqInput and of the requests
to its OpenAI endpoints, and each field must have an example here, so a field that a new SGLang
brings turns this red until somebody decides.
"""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests as http
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate, generate_all, generate_copies
from harness.draws import assert_same_draws
from harness.embeddings import embedding_rows
from harness.grammars import SCHEMA, TAG_AT_ONCE, assert_keeps_to
from harness.logprobs import assert_close, assert_same_logprobs
from harness.processors import serialized
from harness.prompts import STORY, encode, tokenizer_of
from harness.reference import Reference, assert_same, plain_reference
from harness.rounds import RoundCounter, assert_drafting
from harness.server import OVERLAP, Server, ServerPool
from harness.told import OF_THE_CACHE, told
from sglang_ssd.wire.messages import MAX_RID_CHARS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"
VERDICTS = ("speculates", "decodes plainly", "HTTP 400", "at start", "no influence")
NUM_TOKENS = 30

Fields = dict[str, Any]

PARAMS: dict[str, Fields] = {
    "temperature": {"temperature": 0.0},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "min_new_tokens": {"min_new_tokens": 12},
    "logit_bias": {"logit_bias": {"28": -4.0, "260": 1.5}},
    "json_schema": {"json_schema": json.dumps({"type": "string", "maxLength": 60})},
    "regex": {"regex": "( [a-z]+){9,}"},
    "ebnf": {"ebnf": 'root ::= (" " [a-z]+)+'},
    "structural_tag": {"structural_tag": TAG_AT_ONCE},
    "max_new_tokens": {"max_new_tokens": 23},
    "stop": {"stop": ["."]},
    "stop_token_ids": {"stop_token_ids": [30]},
    "stop_regex": {"stop_regex": "[.!]"},
    "ignore_eos": {"ignore_eos": True},
    "no_stop_trim": {"stop": ["."], "no_stop_trim": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "stream_interval": {"stream_interval": 3},
    "custom_params": {"custom_params": {"anything": 1}},
}
"""Greedy examples of what speculates."""

SAMPLED: dict[str, Fields] = {
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "top_k": {"temperature": 0.9, "top_k": 12},
    "min_p": {"temperature": 0.9, "min_p": 0.1},
    "sampling_seed": {"temperature": 0.9},
}
"""Examples that need a seed; the reference is the server with its drafts off."""

OPTIONS: dict[str, Fields] = {
    "stream": {},
    "return_logprob": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True, "logprob_start_len": 2},
    "top_logprobs_num": {"return_logprob": True, "top_logprobs_num": 2},
    "token_ids_logprob": {"return_logprob": True, "token_ids_logprob": [5, 28]},
    "return_text_in_logprobs": {"return_logprob": True, "return_text_in_logprobs": True},
    "return_flat_raw_top_logprobs": {
        **{"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        "return_flat_raw_top_logprobs": True,
    },
    "return_flat_raw_output_top_logprobs": {
        **{"return_logprob": True, "top_logprobs_num": 2},
        "return_flat_raw_output_top_logprobs": True,
    },
    "return_flat_raw_top_logprobs_b64": {
        **{"return_logprob": True, "top_logprobs_num": 2},
        **{"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True},
    },
    "return_prompt_token_ids": {"return_prompt_token_ids": True},
    "custom_logit_processor": {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()},
    "session_id": {"session_id": "a"},
}

REFUSED: dict[str, Fields] = {
    "beam_width": {"sampling_params": {"beam_width": 2, "max_new_tokens": 4}},
    "return_sampling_mask": {"return_sampling_mask": True},
    "sampling_logprobs_mode": {"sampling_logprobs_mode": "support"},
    "return_routed_experts": {"return_routed_experts": True},
    "return_indexer_topk": {"return_indexer_topk": True},
}

ELSEWHERE = {
    "text": "test_bad_requests.py",
    "input_ids": "test_operator.py",
    "sampling_params": "test_operator.py",
    "n": "test_sampled_identity.py",
    "session_params": "test_operator.py",
    "return_hidden_states": "test_hidden_states.py",
    "require_reasoning": "test_sampling_table.py",
    "max_thinking_tokens": "test_sampling_table.py",
    "input_embeds": "test_sampling_table.py",
    "stream_options": "test_clients.py",
}
"""Files whose tests send what needs another server, or another kind of test."""

WITHOUT_INFLUENCE: dict[str, Fields] = {
    "routed_dp_rank": {"routed_dp_rank": 0},
    "data_parallel_rank": {"data_parallel_rank": 0},
    "routing_key": {"routing_key": "a"},
    "routed_experts_start_len": {"routed_experts_start_len": 1},
    "rid": {"rid": "r" * MAX_RID_CHARS},
    "conversation_id": {"conversation_id": "a"},
    "log_metrics": {"log_metrics": False},
    "no_logs": {"no_logs": True},
    "custom_labels": {"custom_labels": {"a": "b"}},
    "background": {"background": True},
    "priority": {"priority": 1},
    "extra_key": {"extra_key": "a"},
    "cache_salt": {"cache_salt": "a"},
    "return_bytes": {"return_bytes": True},
    "return_entropy": {"return_entropy": True},
    "external_trace_header": {"external_trace_header": {"traceparent": "a"}},
}
"""Examples that get what they get of SGLang, with drafts if that is an answer."""

OF_ABSENT_FEATURES: dict[str, Fields] = {
    "lora_path": {"lora_path": "adapter"},
    "watermark": {"watermark": {"enabled": True, "key": "a"}},
    "image_data": {"image_data": ["nowhere.png"]},
    "video_data": {"video_data": ["nowhere.mp4"]},
    "audio_data": {"audio_data": ["nowhere.wav"]},
    "use_audio_in_video": {"use_audio_in_video": True},
    "video_config": {"video_config": {"fps": 1}},
    "modalities": {"modalities": ["image"]},
    "max_dynamic_patch": {"max_dynamic_patch": 4},
    "min_dynamic_patch": {"min_dynamic_patch": 1},
    "image_max_dynamic_patch": {"image_max_dynamic_patch": 4},
    "video_max_dynamic_patch": {"video_max_dynamic_patch": 4},
    "images_config": {"images_config": {"a": 1}},
    "mm_processor_kwargs": {"mm_processor_kwargs": {"a": 1}},
    "bootstrap_host": {"bootstrap_host": "127.0.0.1"},
    "bootstrap_port": {"bootstrap_port": 1},
    "bootstrap_room": {"bootstrap_room": 1},
    "disagg_prefill_dp_rank": {"disagg_prefill_dp_rank": 0},
}
"""Examples that get what SGLang without the feature says to them."""

_OWN = "SGLang sets it itself; what a client sends there breaks SGLang alone too"
NEVER_SENT = {
    "positional_embed_overrides": "JSON has none (400: test_bad_requests.py), and no endpoint that "
    "makes them decodes: /v1/score in test_operator.py; that such a request decodes plainly is in "
    "test_row_transforms.py",
    **dict.fromkeys(("stop_strs", "stop_regex_strs", "stop_str_max_len"), _OWN),
    **dict.fromkeys(("stop_regex_max_len", "is_normalized", "ebnf_full_assistant"), _OWN),
    **dict.fromkeys(("http_worker_ipc", "received_time", "kv_hints", "lora_id"), _OWN),
    **dict.fromkeys(("mm_hashes", "mm_content_hashes", "need_wait_for_mm_inputs"), _OWN),
    **dict.fromkeys(("num_items_assigned", "encoder_urls", "bootstrap_pair_key"), _OWN),
    "decode_tp_size": _OWN,
    **dict.fromkeys(
        ("multi_item_delimiter_indices", "token_indices_to_pool"), "of scoring: test_operator.py"
    ),
}

COMPLETIONS, CHAT, RESPONSES = "completions", "chat/completions", "responses"
QUESTION = "Name three rivers of Europe."
OPENAI_BODIES: dict[str, Fields] = {
    COMPLETIONS: {"model": "any", "prompt": STORY, "max_tokens": NUM_TOKENS},
    CHAT: {
        "model": "any",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": NUM_TOKENS,
    },
    RESPONSES: {"input": QUESTION, "max_output_tokens": NUM_TOKENS},
}
OPENAI_MODELS = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatCompletionRequest,
    RESPONSES: ResponsesRequest,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "rivers",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
STARTED = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "The Danube, the"},
]
OPENAI: dict[str, tuple[Fields, ...]] = {
    COMPLETIONS: (
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"suffix": " and so on"},
        {"best_of": 2},
        {"logprobs": 2},
        {"min_tokens": 12, "user": "a"},
        {"response_format": {"type": "json_object"}},
        {"return_token_ids": True, "return_cached_tokens_details": True},
        {"return_spec_tokens_details": True, "seed": 3},
        {"n": 2, "stop": ["."]},
    ),
    CHAT: (
        {"logprobs": True, "top_logprobs": 2},
        {
            **{"logprobs": True, "top_logprobs": 2, "return_meta_info": True},
            **{
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": False,
            },
        },
        {"max_completion_tokens": 11, "max_tokens": None},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"return_token_ids": True, "return_meta_info": True},
        {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
        {"return_prompt_token_ids": True, "return_cached_tokens_details": True},
        {"return_spec_tokens_details": True},
        {"reasoning_effort": "low"},
        {"thinking": {"type": "adaptive"}, "task": "query"},
        {"messages": STARTED, "continue_final_message": True},
        {"separate_reasoning": False, "stream_reasoning": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    RESPONSES: (
        {},
        {"instructions": "Be brief.", "metadata": {"a": "b"}, "request_id": "resp_a"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"reasoning": {"effort": "low"}, "service_tier": "auto", "truncation": "disabled"},
        {"store": False, "max_tool_calls": 1, "user": "a", "model": "any"},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"previous_response_id": "resp_of_nobody"},
    ),
}
"""Examples that are answered as SGLang answers them; stream_options is in test_clients.py."""


def table() -> dict[str, str]:
    """Verdict of each parameter; a name that stands in both sections has one verdict."""
    verdicts: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and cells[1] in VERDICTS:
            for name in re.findall(r"`(\w+)`", cells[0]):
                assert verdicts.setdefault(name, cells[1]) == cells[1], name
    return verdicts


def known_fields() -> set[str]:
    request = {field.name for field in dataclasses.fields(GenerateReqInput)}
    openai = {name for model in OPENAI_MODELS.values() for name in model.model_fields}
    return request | set(SamplingParams.__struct_fields__) | openai


def test_the_table_has_every_field_and_no_other() -> None:
    """Red when a new SGLang brings a parameter, or drops one."""
    assert set(table()) == known_fields()


def test_every_verdict_has_an_example() -> None:
    """Red when a row is added without a proof."""
    openai = {name for cases in OPENAI.values() for fields in cases for name in fields}
    openai |= {name for body in OPENAI_BODIES.values() for name in body}
    shown = {
        "speculates": {*PARAMS, *SAMPLED, *OPTIONS, *ELSEWHERE, *openai},
        "decodes plainly": {*ELSEWHERE, *NEVER_SENT},
        "HTTP 400": {*REFUSED},
        "at start": {*OF_ABSENT_FEATURES, *NEVER_SENT, *openai},
        "no influence": {*WITHOUT_INFLUENCE, *NEVER_SENT, *openai},
    }
    for name, verdict in table().items():
        assert name in shown[verdict], f"{name}: {verdict}"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_file_that_is_named_sends_it(name: str) -> None:
    """Red when a test that is pointed to is moved, or no longer asks for the parameter."""
    text = (Path(__file__).parent / ELSEWHERE[name]).read_text()
    pointer = f'    "{name}": "{ELSEWHERE[name]}",'
    assert f'"{name}": ' in text.replace(pointer, "")


@pytest.fixture
def server(pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for("self"))


@pytest.fixture
def story(server: Server) -> tuple[int, ...]:
    return tuple(tokenizer_of(server.spec.model).encode(STORY))


def test_what_speculates(server: Server, reference: Reference, story: tuple[int, ...]) -> None:
    """Red when a parameter makes a request decode plainly, or changes what it gets."""
    cases = {
        name: Request(story, {"max_new_tokens": NUM_TOKENS, **params})
        for name, params in PARAMS.items()
    }
    bias = {"custom_params": {"token_ids": [28, 260]}}
    for name, options in OPTIONS.items():
        params = bias if name == "custom_logit_processor" else {}
        cases[name] = Request(story, {"max_new_tokens": NUM_TOKENS, **params}, options)
    before = plain_rows(server)
    answers = generate_all(server.url, list(cases.values()), concurrency=6)
    assert_same(reference, list(cases.values()), answers)
    assert plain_rows(server) == before
    for name, answer in zip(cases, answers, strict=True):
        assert answer.num_correct_drafts > 0, f"{name} was decoded plainly"
    said = dict(zip(cases, answers, strict=True))
    assert said["structural_tag"].text.startswith("<a>")
    assert said["return_prompt_token_ids"].prompt_token_ids == list(story)
    for want, have in zip(reference.answers(list(cases.values())), answers, strict=True):
        assert_same_logprobs(want, have)
        assert have.prompt_token_ids == want.prompt_token_ids
        assert told_beside_logprobs(have) == told_beside_logprobs(want)


def told_beside_logprobs(answer: Answer) -> Fields:
    """The rest of the meta_info, whose arrays of logprobs are compared by value."""
    rest = {key: value for key, value in answer.meta_info.items() if "logprobs" not in key}
    found: Fields = told(rest, but=OF_THE_CACHE)
    return found


def plain_rows(server: Server) -> int:
    """Rows that have decoded plainly because of a parameter or an opt-out."""
    counts = server.ssd()["plain_decode"]
    return int(counts.get("parameter", 0) + counts.get("opt_out", 0))


def test_what_speculates_when_sampled(
    server: Server, drafts_off: Reference, story: tuple[int, ...]
) -> None:
    """Red when a filter lags in some row, or a seed means another draw in another batch or order.

    OpenAI's `seed` is the same seed.
    """
    cases = [
        Request(story, {"max_new_tokens": NUM_TOKENS, "sampling_seed": seed, **params})
        for params in SAMPLED.values()
        for seed in (1, 2**62 + 5)
    ]
    before = plain_rows(server)
    answers = generate_all(server.url, cases[::-1], concurrency=8)[::-1]
    assert_same_draws(drafts_off, cases, answers)
    assert plain_rows(server) == before
    assert all(answer.num_correct_drafts > 0 for answer in answers)
    body = {"model": "m", "prompt": STORY, "max_tokens": NUM_TOKENS, "temperature": 0.9, "seed": 1}
    reply = http.post(f"{server.url}/v1/completions", json=body, timeout=600).json()
    assert reply["choices"][0]["text"] == answers[-2].text


def test_openai_copies_differ_and_repeat(server: Server, story: tuple[int, ...]) -> None:
    """Red when OpenAI's seed with n > 1 gives equal copies, or others the next time."""
    body = {"model": "m", "prompt": STORY, "max_tokens": 20, "temperature": 1.0, "seed": 9, "n": 3}

    def texts() -> list[str]:
        reply = http.post(f"{server.url}/v1/completions", json=body, timeout=600).json()
        return [choice["text"] for choice in reply["choices"]]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first
    greedy = generate_copies(server.url, Request(story, {"max_new_tokens": 20, "n": 2}))
    assert greedy[0].output_ids == greedy[1].output_ids


def test_what_decodes_plainly(server: Server, reference: Reference, story: tuple[int, ...]) -> None:
    """Red when such a request gets drafts, or other tokens."""
    cases = [
        Request(story, {"max_new_tokens": 12, "custom_params": {"ssd": False}}),
        Request(
            story,
            {"max_new_tokens": 12, "custom_params": {"unused": 0}},
            {"custom_logit_processor": serialized("CountCalls")},
        ),
        Request(story, {"max_new_tokens": 12}, {"rid": "r" * (MAX_RID_CHARS + 1)}),
    ]
    before = plain_rows(server)
    answers = generate_all(server.url, cases)
    assert_same(reference, cases, answers)
    assert [answer.num_correct_drafts for answer in answers] == [0] * len(cases)
    assert plain_rows(server) == before + sum(len(answer.output_ids) - 1 for answer in answers)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, streamed: bool, server: Server, story: tuple[int, ...]) -> None:
    """Red when a parameter that is not served is ignored, or the refusal does not name it."""
    body = {
        "input_ids": story,
        "sampling_params": {"max_new_tokens": 4},
        "stream": streamed,
        **REFUSED[name],
    }
    reply = http.post(f"{server.url}/generate", json=body, timeout=600)
    if streamed:
        assert reply.status_code == 200
        first = reply.text.removeprefix("data: ").splitlines()[0]
        message = json.loads(first)["error"]["message"]
    else:
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
    assert name in message
    assert server.healthy()


def test_what_has_no_influence_or_no_feature(
    server: Server, reference: Reference, story: tuple[int, ...]
) -> None:
    """Red when a field that is SGLang's own affair is refused, changes tokens or costs drafts."""
    examples = {**WITHOUT_INFLUENCE, **OF_ABSENT_FEATURES}
    bodies = [
        Request(story, {"max_new_tokens": NUM_TOKENS}, fields).body()
        for fields in examples.values()
    ]
    want, have = (outcomes(one, bodies) for one in (reference.server, server))
    for name, expected, got in zip(examples, want, have, strict=True):
        assert got[:2] == expected[:2], name
        assert got[0] != 200 or got[2] > 0, f"{name} was decoded plainly"
    assert sum(status == 200 for status, *_ in have) > len(examples) / 2


def outcomes(server: Server, bodies: list[Fields]) -> list[tuple[int, Any, int]]:
    with ThreadPoolExecutor(6) as clients:
        return list(clients.map(lambda body: outcome(server, "/generate", body), bodies))


def outcome(server: Server, path: str, body: Fields) -> tuple[int, Any, int]:
    """Status, what is said, and how many drafts were right."""
    reply = http.post(f"{server.url}{path}", json=body, timeout=120)
    said = reply.json()
    if reply.status_code != 200:
        error = said.get("message") or said["error"]
        return reply.status_code, error["message"] if isinstance(error, dict) else error, 0
    if path == "/generate":
        meta = said["meta_info"]
        answered = said["output_ids"], said["text"], meta["finish_reason"]
        return 200, answered, meta.get("spec_num_correct_drafts", 0)
    details = (said.get("sglext") or {}).get("spec_tokens_details") or {}
    return 200, told(said), details.get("spec_num_correct_drafts", 0)


@pytest.mark.parametrize("path", OPENAI)
def test_openai_fields(path: str, server: Server, reference: Reference) -> None:
    """Red when a field of an OpenAI endpoint means something else under speculation, or is lost
    from the answer, or makes its request decode plainly.

    All of both answers is compared, how much of a prompt was cached as well: under a salt of their
    own these requests find in either server's cache what they left there themselves.
    """
    before, plain_before = server.ssd()["correct_drafts"], plain_rows(server)
    statuses = []
    for fields in OPENAI[path]:
        body = {"temperature": 0, "cache_salt": path, **OPENAI_BODIES[path], **fields}
        want, have = (outcome(one, f"/v1/{path}", body) for one in (reference.server, server))
        assert have[0] == want[0], (fields, have)
        assert_close(want[1], have[1], str(fields))
        assert plain_rows(server) == plain_before, fields
        told_of_drafts = "return_spec_tokens_details" in fields
        assert (have[2] > 0) == told_of_drafts, fields
        statuses.append(have[0])
    assert statuses.count(200) > len(statuses) / 2, statuses
    assert server.ssd()["correct_drafts"] > before
    assert server.healthy()


@pytest.fixture
def uncached_server(pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for("self", flags=("--disable-radix-cache",)))


def test_without_the_prefix_cache(uncached_server: Server, reference: Reference) -> None:
    """Red when drafts end with the prefix cache, or a prompt that is read again tells otherwise."""
    story = encode(uncached_server.spec.model, STORY)
    cases = [Request(story[:end], {"max_new_tokens": NUM_TOKENS}) for end in (len(story), -3)]
    for _ in range(2):
        answers = generate_all(uncached_server.url, cases)
        assert_same(reference, cases, answers)
        assert all(answer.num_correct_drafts > 0 for answer in answers)


def test_embeddings_decode_plainly(uncached_server: Server) -> None:
    """Red when a prompt of embeddings is mirrored as the ids that stand in for it.

    SGLang takes embeddings only without its prefix cache.
    """
    server = uncached_server
    story = encode(server.spec.model, STORY)
    body = {
        "input_embeds": embedding_rows(server.spec.model, story),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 12},
    }
    before = plain_rows(server)
    reply = http.post(f"{server.url}/generate", json=body, timeout=600)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["meta_info"].get("spec_num_correct_drafts", 0) == 0
    assert plain_rows(server) - before == answer["meta_info"]["completion_tokens"] - 1
    plainly = {"max_new_tokens": 12, "custom_params": {"ssd": False}}
    assert answer["text"] == generate(server.url, Request(story, plainly)).text


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("self", ()), ("random", ()), ("self", OVERLAP)],
    ids=["self", "random", "self-overlap"],
)
def test_reasoning_and_its_budget(
    kind: DrafterKind,
    settings: Any,
    target: Path,
    pool: ServerPool,
    reference_pool: ServerPool,
    spec_for: Any,
) -> None:
    """Red when a verify's rows count the thinking tokens of other rows, those of wrong drafts
    among them, or a grammar begins early or late behind the thought."""
    flags = ("--reasoning-parser", "qwen3", "--enable-strict-thinking")
    server = pool.get(spec_for(kind, flags=flags, settings=settings))
    reference = plain_reference(reference_pool, target, flags)
    story = encode(server.spec.model, STORY)
    constrained = {"max_new_tokens": 60, "json_schema": SCHEMA}
    cases = [
        *(
            Request(story, constrained, {"require_reasoning": True, "max_thinking_tokens": budget})
            for budget in (0, 3, 9)
        ),
        Request(
            story, {"max_new_tokens": 24}, {"require_reasoning": True, "max_thinking_tokens": 5}
        ),
        Request(story, {"max_new_tokens": 24}, {"require_reasoning": True}),
        Request(story, constrained),
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=len(cases))
    assert_drafting(kind, counter.since())
    assert_same(reference, cases, answers)
    for case, want, have in zip(cases, reference.answers(cases), answers, strict=True):
        assert kind == "random" or have.num_correct_drafts > 0, f"{case} was decoded plainly"
        assert have.meta_info["reasoning_tokens"] == want.meta_info["reasoning_tokens"]
    for answer in answers[:3]:
        _, end, constrained_text = answer.text.partition("</think>")
        assert end, answer.text
        if answer.finish["type"] == "stop":
            assert_keeps_to(cases[0].params, constrained_text)
