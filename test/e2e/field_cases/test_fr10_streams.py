"""FR-10: what arrives in pieces is the whole text, also where a character spans tokens."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checkpoints import DrafterKind
from harness.client import Request, openai, openai_stream, stream, stream_increments
from harness.prompts import SPELLED, encode
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server, ServerPool

REPLACEMENT = "\ufffd"
SPANNING = ("emoji", "cjk")
"""Whose answers have characters of several tokens."""
INTERVAL = 3


@pytest.mark.parametrize("stream_interval", [1, 3])
@pytest.mark.parametrize("name", SPELLED)
def test_fr_10(
    name: str, stream_interval: int, kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when a character, or a word at a run's border, is cut, lost or garbled."""
    params = {"max_new_tokens": 32, "stream_interval": stream_interval, "ignore_eos": True}
    case = Request(encode(server.spec.model, SPELLED[name]), params)
    counter = RoundCounter(server)
    streamed = stream(server.url, case)
    assert_drafting(kind, counter.since())
    assert_same(reference, [case], [streamed.answer])
    whole = streamed.answer.text
    assert name not in SPANNING or not whole.isascii()
    assert streamed.texts[-1] == whole
    assert all(whole.startswith(part) for part in streamed.texts)
    assert REPLACEMENT in whole or not any(REPLACEMENT in part for part in streamed.texts)


@pytest.mark.parametrize("name", SPELLED)
def test_fr_10_openai(name: str, kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when the deltas of either OpenAI endpoint do not join to the whole answer."""
    counter = RoundCounter(server)
    assert_joined(name, server, reference)
    assert_drafting(kind, counter.since())


def assert_joined(name: str, server: Server, reference: Reference) -> None:
    common = {"max_tokens": 24, "ignore_eos": True}
    completion = {"prompt": SPELLED[name], **common}
    whole = openai(reference.server.url, "completions", completion)["choices"][0]["text"]
    assert name not in SPANNING or not whole.isascii()
    deltas = [choice["text"] for choice in openai_stream(server.url, "completions", completion)]
    assert "".join(deltas) == whole
    assert REPLACEMENT in whole or not any(REPLACEMENT in delta for delta in deltas)
    chat = {"messages": [{"role": "user", "content": SPELLED[name]}], **common}
    answer = openai(reference.server.url, "chat/completions", chat)["choices"][0]["message"]
    chunks = openai_stream(server.url, "chat/completions", chat)
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == answer["content"]


def test_fr_10_increments_of_three_tokens(
    kind: DrafterKind, pool: ServerPool, spec_for: Any, reference: Reference
) -> None:
    """Red when a server that streams increments, three tokens at a time at least, loses a piece or
    sends one twice, to /generate or over OpenAI, whose clients cannot ask for an interval."""
    flags = ("--stream-interval", str(INTERVAL), "--incremental-streaming-output")
    server = pool.get(spec_for(kind, flags=flags))
    counter = RoundCounter(server)
    for name, text in SPELLED.items():
        case = Request(encode(server.spec.model, text), {"max_new_tokens": 32, "ignore_eos": True})
        texts, answer = stream_increments(server.url, case)
        assert_same(reference, [case], [answer])
        assert len(texts) <= 2 + 32 // INTERVAL
        assert REPLACEMENT in answer.text or not any(REPLACEMENT in part for part in texts)
        assert_joined(name, server, reference)
    assert_drafting(kind, counter.since())
