"""FR-10: what arrives in pieces is the whole text, also where a character spans tokens."""

from __future__ import annotations

import pytest

from harness.checkpoints import DrafterKind
from harness.client import Request, openai, openai_stream, stream
from harness.prompts import SPELLED, encode
from harness.reference import Reference, assert_same
from harness.rounds import assert_drafted
from harness.server import Server

REPLACEMENT = "\ufffd"


@pytest.mark.parametrize("stream_interval", [1, 3])
@pytest.mark.parametrize("name", SPELLED)
def test_fr_10(
    name: str, stream_interval: int, kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when a character, or a word at a run's border, is cut, lost or garbled."""
    params = {"max_new_tokens": 32, "stream_interval": stream_interval, "ignore_eos": True}
    case = Request(encode(server.spec.model, SPELLED[name]), params)
    streamed = stream(server.url, case)
    assert_same(reference, [case], [streamed.answer])
    assert_drafted(kind, [streamed.answer])
    whole = streamed.answer.text
    assert streamed.texts[-1] == whole
    assert all(whole.startswith(part) for part in streamed.texts)
    assert REPLACEMENT in whole or not any(REPLACEMENT in part for part in streamed.texts)


@pytest.mark.parametrize("name", SPELLED)
def test_fr_10_openai(name: str, server: Server, reference: Reference) -> None:
    """Red when the deltas of either OpenAI endpoint do not join to the whole answer."""
    common = {"max_tokens": 24, "ignore_eos": True}
    completion = {"prompt": SPELLED[name], **common}
    whole = openai(reference.server.url, "completions", completion)["choices"][0]["text"]
    deltas = [choice["text"] for choice in openai_stream(server.url, "completions", completion)]
    assert "".join(deltas) == whole
    assert REPLACEMENT in whole or not any(REPLACEMENT in delta for delta in deltas)
    chat = {"messages": [{"role": "user", "content": SPELLED[name]}], **common}
    answer = openai(reference.server.url, "chat/completions", chat)["choices"][0]["message"]
    chunks = openai_stream(server.url, "chat/completions", chat)
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == answer["content"]
