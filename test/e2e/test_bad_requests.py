"""What a running server refuses: each HTTP 400 of ours with its whole message, streamed or not.

And one of SGLang's own, which docs/sampling.md has beside ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests as http
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from harness.client import Request, generate, generate_all, streamed_beside
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import Server, ServerPool

NOT_SERVED = "not served with --speculative-algorithm SSD"


class BadRequest(msgspec.Struct, frozen=True):
    name: str
    fields: dict[str, Any]
    says: str


CASES = (
    BadRequest("mask", {"return_sampling_mask": True}, f"return_sampling_mask True: {NOT_SERVED}"),
    BadRequest(
        "experts", {"return_routed_experts": True}, f"return_routed_experts True: {NOT_SERVED}"
    ),
    BadRequest("indexer", {"return_indexer_topk": True}, f"return_indexer_topk True: {NOT_SERVED}"),
    BadRequest(
        "mode-without-mask",
        {"sampling_logprobs_mode": "support"},
        "sampling_logprobs_mode can only be set when return_sampling_mask=true.",
    ),
    BadRequest("beams", {"sampling_params": {"beam_width": 3}}, f"beam_width 3: {NOT_SERVED}"),
    BadRequest(
        "top-k",
        {"sampling_params": {"top_k": 2**31}},
        "top_k 2147483648: must be at most 2147483647",
    ),
    BadRequest(
        "opt-out",
        {"sampling_params": {"custom_params": {"ssd": "no"}}},
        "custom_params ssd 'no': must be true, false or null",
    ),
    BadRequest(
        "custom-params",
        {"sampling_params": {"custom_params": [1]}},
        "custom_params [1]: must be an object",
    ),
    BadRequest(
        "logprobs",
        {
            "return_logprob": True,
            "logprob_start_len": -2,
            "top_logprobs_num": 49153,
        },
        "logprob_start_len -2: must be at least -1; top_logprobs_num 49153: must be 0 to 49152",
    ),
    BadRequest(
        "stops",
        {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": [99999999, -1]}},
        "stop_token_ids [99999999, -1]: must be 0 to 49151 where min_new_tokens is given",
    ),
    BadRequest(
        "processor",
        {"custom_logit_processor": "garbage"},
        "custom_logit_processor 'garbage': must be the text of CustomLogitProcessor.to_str() "
        "(JSONDecodeError: unexpected character, expected a JSON value: line 1 column 1 (char 0))",
    ),
    BadRequest(
        "pickle",
        {"custom_logit_processor": '{"callable": "00"}'},
        'custom_logit_processor \'{"callable": "00"}\': must be the text of '
        "CustomLogitProcessor.to_str() (UnpicklingError: invalid load key, '\\x00'.)",
    ),
    BadRequest("empty-text", {"text": ""}, "prompt '': must have a token"),
    BadRequest(
        "foreign-id", {"text": None, "input_ids": [5, 49152]}, "input_ids 49152: must be 0 to 49151"
    ),
    BadRequest(
        "negative-id", {"text": None, "input_ids": [-1]}, "input_ids -1: must be 0 to 49151"
    ),
    BadRequest(
        "overrides",
        {"positional_embed_overrides": {"positions": [0]}},
        "positional_embed_overrides {'positions': [0]}: must be a PositionalEmbeds",
    ),
    BadRequest(
        "both",
        {"return_sampling_mask": True, "sampling_params": {"custom_params": {"ssd": 0}}},
        f"return_sampling_mask True: {NOT_SERVED}; "
        "custom_params ssd 0: must be true, false or null",
    ),
)


@pytest.fixture(scope="module")
def server(pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for("self"))


def test_an_empty_processor_is_none(server: Server) -> None:
    """Red when the text that SGLang takes for no processor ends the server, alone or in a batch."""
    texts = ["", DisallowedTokensLogitsProcessor.to_str(), ""]
    cases = [
        Request(
            "Hello",
            {"max_new_tokens": 6, "custom_params": {"token_ids": [28]}},
            {"custom_logit_processor": text},
        )
        for text in texts
    ]
    first, _, last = generate_all(server.url, cases, concurrency=3)
    assert first.same_as(last)
    assert first.same_as(generate(server.url, Request("Hello", {"max_new_tokens": 6})))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_generate_refuses_with_the_whole_reason(server: Server, case: BadRequest) -> None:
    """Red when a parameter that is not served is ignored, or the client is not told which."""
    assert_refused(server, case)


def assert_refused(server: Server, case: BadRequest) -> None:
    body = {"text": "Hello", **case.fields}
    answer = http.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == case.says
    streamed = http.post(f"{server.url}/generate", json={**body, "stream": True}, timeout=60)
    assert streamed.status_code == 200, "SGLang's streams of /generate begin before they are read"
    (event,) = events_of(streamed)
    assert event["error"]["message"] == case.says
    assert (event["error"]["code"], event["error"]["type"]) == (400, "invalid_request_error")
    assert streamed.text.endswith("data: [DONE]\n\n")


def events_of(answer: http.Response) -> list[Any]:
    """What a stream says, but for its end."""
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_streams_are_refused_as_sglang_refuses_them(server: Server, reference: Reference) -> None:
    """Red when the event of a refusal of ours is another one than of SGLang's own."""
    body = {"text": "Hello", "stream": True}
    theirs = {"sampling_params": {"top_p": 2}}
    ours = {"return_sampling_mask": True}
    (want,), (have,) = (
        events_of(http.post(f"{one.url}/generate", json={**body, **fields}, timeout=60))
        for one, fields in ((reference.server, theirs), (server, ours))
    )
    for event in (want, have):
        del event["error"]["message"]
    assert have == want


OPENAI = {
    "completions": {"prompt": "Hello"},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


MANY = 2**31
TOO_MANY = f"top_k {MANY}: must be at most {MANY - 1}"
"""What each endpoint takes for the same parameter."""


def test_responses_refuse_with_the_whole_reason(server: Server) -> None:
    """Red when /v1/responses takes what /generate refuses, or tells it of a stream otherwise than
    SGLang: by its last event. It serves no model of another name."""
    body = {
        **{"model": server.spec.model, "input": "Hello"},
        **{"max_output_tokens": 8, "top_k": MANY},
    }
    answer = http.post(f"{server.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == TOO_MANY
    streamed = http.post(f"{server.url}/v1/responses", json={**body, "stream": True}, timeout=60)
    assert streamed.status_code == 200
    *begun, last = events_of(streamed)
    assert [event["type"] for event in begun] == ["response.created", "response.in_progress"]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": TOO_MANY}


def test_messages_refuse_with_the_whole_reason(server: Server) -> None:
    """Red when /v1/messages takes what /generate refuses, or its stream does not end as SGLang ends
    those that fail."""
    message = [{"role": "user", "content": "Hello"}]
    body = {"model": "any", "max_tokens": 8, "messages": message, "top_k": MANY}
    answer = http.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == TOO_MANY
    streamed = http.post(f"{server.url}/v1/messages", json={**body, "stream": True}, timeout=60)
    assert streamed.status_code == 200
    begun, failed, ended = events_of(streamed)
    assert (begun["type"], ended["type"]) == ("message_start", "message_stop")
    said = {"type": "invalid_request_error", "message": TOO_MANY}
    assert (failed["type"], failed["error"]) == ("error", said)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", OPENAI)
def test_openai_refuses_with_the_whole_reason(server: Server, path: str, stream: bool) -> None:
    """Red when the OpenAI endpoints take what /generate refuses, or say less."""
    body = {"model": "any", "stream": stream, **OPENAI[path]}
    experts = "return_routed_experts"
    opt_out = "custom_params ssd 'no': must be true, false or null"
    cases = (
        ({"custom_params": {"ssd": "no"}}, opt_out),
        ({"top_k": MANY}, TOO_MANY),
        ({experts: True}, f"{experts} True: {NOT_SERVED}"),
        (
            {experts: True, "custom_params": {"ssd": "no"}},
            f"{experts} True: {NOT_SERVED}; {opt_out}",
        ),
    )
    for fields, says in cases:
        answer = http.post(f"{server.url}/v1/{path}", json={**body, **fields}, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["message"] == says


RELOADS = {
    "unknown-field": ('{"modelpath": "x"}', "Object contains unknown field `modelpath`"),
    "wrong-type": ('{"model_path": 5}', "Expected `str | null`, got `int` - at `$.model_path`"),
    "cut-off": ("{", "Input data was truncated"),
    "no-object": ("[]", "Expected `object`, got `array`"),
}


@pytest.mark.parametrize(("body", "says"), RELOADS.values(), ids=RELOADS)
def test_reload_refuses_a_body(server: Server, body: str, says: str) -> None:
    """Red when a misspelt field reloads the present model instead."""
    assert_no_reload(server, body, says)


def assert_no_reload(server: Server, body: str, says: str) -> None:
    answer = http.post(f"{server.url}/ssd/reload_drafter", data=body, timeout=60)
    assert answer.status_code == 400
    whole = f"body of /ssd/reload_drafter: {says}; known are model_path, revision"
    assert answer.json() == {"error": {"message": whole}}


def test_no_request_notices_a_bad_one(server: Server, reference: Reference) -> None:
    """Red when one that is refused costs another, which runs meanwhile, its answer or drafts."""
    (prompt,) = load_prompts(server.spec.model, 1)
    good = Request(prompt.input_ids, {"max_new_tokens": 60, "ignore_eos": True})
    with streamed_beside(server.url, [good]) as beside:
        for case in CASES:
            assert_refused(server, case)
        for body, says in RELOADS.values():
            assert_no_reload(server, body, says)
    assert_same(reference, *zip(*beside, strict=True))
    assert all(answer.num_correct_drafts > 0 for _, answer in beside)


def test_reload_refuses_a_model(server: Server, tmp_path: Path) -> None:
    """Red when a checkpoint that can be seen to be none ends the drafter that serves."""
    before = server.ssd()["drafter_pid"]
    for path in (tmp_path / "nowhere", tmp_path):
        missing = path if path != tmp_path else tmp_path / "config.json"
        body = {"model_path": str(path)}
        answer = http.post(f"{server.url}/ssd/reload_drafter", json=body, timeout=60)
        assert answer.status_code == 400
        assert answer.json() == {"error": {"message": f"draft model: {missing} is missing"}}
    assert server.ssd()["drafter_pid"] == before
    assert server.ssd()["state"] == "ready"
