"""What a running server refuses: each HTTP 400 of ours with its whole message, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import requests as http

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
    BadRequest("beams", {"sampling_params": {"beam_width": 3}}, f"beam_width 3: {NOT_SERVED}"),
    BadRequest(
        "opt-out",
        {"sampling_params": {"custom_params": {"ssd": "no"}}},
        "custom_params ssd 'no': must be true or false",
    ),
    BadRequest(
        "both",
        {"return_sampling_mask": True, "sampling_params": {"custom_params": {"ssd": 0}}},
        f"return_sampling_mask True: {NOT_SERVED}; custom_params ssd 0: must be true or false",
    ),
)


@pytest.fixture(scope="module")
def server(pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for("self"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_generate_refuses_with_the_whole_reason(server: Server, case: BadRequest) -> None:
    """Red when a parameter that is not served is ignored, or the client is not told which."""
    body = {"text": "Hello", **case.fields}
    answer = http.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == case.says
    streamed = http.post(f"{server.url}/generate", json={**body, "stream": True}, timeout=60)
    first = streamed.text.splitlines()[0]
    assert json.loads(first.removeprefix("data: "))["error"]["message"] == case.says


@pytest.mark.parametrize("stream", [False, True])
def test_openai_refuses_with_the_whole_reason(server: Server, stream: bool) -> None:
    """Red when the OpenAI endpoints take what /generate refuses."""
    body = {"model": "any", "prompt": "Hello", "custom_params": {"ssd": "no"}, "stream": stream}
    answer = http.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert "custom_params ssd 'no': must be true or false" in answer.text
    if not stream:
        assert answer.status_code == 400
