"""The OpenAI client against a server: what its answers say, whole or in pieces, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from openai import APIError, APIStatusError, AsyncOpenAI, OpenAI

from harness.grammars import without_clock
from harness.prompts import STORY
from harness.server import Server
from harness.told import OF_THE_CACHE, told

QUESTION = "Name three rivers of Europe."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}
TOOL: Any = {"type": "function", "function": WEATHER}
PLAINLY: dict[str, Any] = {"custom_params": {"ssd": False}}
"""Drafts off for one request, on a server with SSD."""


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def async_client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(server: Server, **options: Any) -> Any:
    full = {"model": "default", "messages": MESSAGES, "temperature": 0, "max_tokens": 40, **options}
    return client_of(server).chat.completions.create(**full)


def told_by_chat(server: Server, *, streamed: bool, **options: Any) -> dict[str, Any]:
    answer = chat(server, stream=streamed, **options)
    return join_chat(answer) if streamed else told_whole(answer)


def told_by_completion(server: Server, *, streamed: bool, **options: Any) -> dict[str, Any]:
    full = {"model": "default", "prompt": STORY, "temperature": 0, "max_tokens": 40, **options}
    answer = client_of(server).completions.create(stream=streamed, **full)
    return join_chat(answer) if streamed else told_whole(answer)


def told_by_responses(server: Server, *, streamed: bool, **options: Any) -> dict[str, Any]:
    """Of a model that is named as the server names it, for /v1/responses serves no other."""
    full = {"model": server.spec.model, "input": QUESTION, "max_output_tokens": 64, **options}
    answer = client_of(server).responses.create(stream=streamed, temperature=0, **full)
    return join_response(answer) if streamed else told_whole(answer)


def told_whole(answer: Any) -> dict[str, Any]:
    said = answer.model_dump(mode="json", warnings=False)
    found: dict[str, Any] = told(said, but=OF_THE_CACHE)
    return found


def join_chat(chunks: Iterable[Any]) -> dict[str, Any]:
    """What the pieces of a chat or a completion add up to, by index of the choice; and the usage,
    if one brings it."""
    choices: dict[str, Any] = {}
    usage = None
    for chunk in map(told_whole, chunks):
        usage = chunk.get("usage") or usage
        for piece in chunk["choices"]:
            empty = {"text": "", "thought": "", "calls": {}, "logprobs": [], "end": None}
            _add(choices.setdefault(str(piece["index"]), empty), piece)
    return {"choices": choices, "usage": usage}


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    delta = piece.get("delta") or {"content": piece.get("text")}
    choice["text"] += delta.get("content") or ""
    choice["thought"] += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls") or ():
        said = choice["calls"].setdefault(str(call["index"]), {"name": "", "arguments": ""})
        for key in said:
            said[key] += call["function"].get(key) or ""
    if piece.get("logprobs"):
        choice["logprobs"] += _entries(piece["logprobs"])
    if piece.get("finish_reason"):
        choice["end"] = [piece["finish_reason"], piece.get("matched_stop")]


def _entries(logprobs: dict[str, Any]) -> list[Any]:
    """Of a chat, or of a completion: one for each token."""
    if logprobs.get("content") is not None:
        entries: list[Any] = logprobs["content"]
        return entries
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    return [list(pair) for pair in pairs]


def join_response(events: Iterable[Any]) -> dict[str, Any]:
    """The kinds of events in their order, what the deltas of each kind add up to, and the response
    as its last event has it."""
    kinds: list[str] = []
    joined: dict[str, str] = {}
    last: dict[str, Any] = {}
    for event in events:
        last = told_whole(event)
        if kinds[-1:] != [event.type]:
            kinds.append(event.type)
        if isinstance(last.get("delta"), str):
            joined[event.type] = joined.get(event.type, "") + last["delta"]
    return {"kinds": kinds, "joined": joined, "response": last["response"]}


def outcome(ask: Callable[[], Any]) -> tuple[str, Any]:
    """ "said" and what that is, or "refused" and how: with a status, or inside of a stream."""
    try:
        return "said", ask()
    except APIStatusError as error:
        return "refused", [error.status_code, without_clock(error.message)]
    except APIError as error:
        return "refused", [without_clock(error.message)]
