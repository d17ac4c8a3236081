"""Requests to /generate and what comes back, whole or streamed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import requests

TIMEOUT_S = 600.0


class Request(msgspec.Struct, frozen=True):
    prompt: str | tuple[int, ...]
    params: dict[str, Any] = {}
    """sampling_params"""
    options: dict[str, Any] = {}
    """Other fields of the body, such as return_logprob."""

    def body(self) -> dict[str, Any]:
        key = "text" if isinstance(self.prompt, str) else "input_ids"
        params = {"temperature": 0.0, **self.params}
        return {key: self.prompt, "sampling_params": params, **self.options}


class Answer(msgspec.Struct, frozen=True):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    prompt_token_ids: list[int] | None = None
    """If they were asked for."""

    @property
    def finish(self) -> dict[str, Any]:
        reason: dict[str, Any] = self.meta_info["finish_reason"]
        return reason

    @property
    def num_correct_drafts(self) -> int:
        return int(self.meta_info.get("spec_num_correct_drafts", 0))

    def same_as(self, other: Answer) -> bool:
        return (self.output_ids, self.text, self.finish) == (
            other.output_ids,
            other.text,
            other.finish,
        )


class Stream(msgspec.Struct, frozen=True):
    answer: Answer
    """Built from the last chunk."""
    texts: list[str]
    """Text so far, per chunk."""
    times: list[float]
    """Arrival of each chunk, seconds on the monotonic clock."""
    counts: list[int]
    """Tokens so far, per chunk."""

    @property
    def longest_gap(self) -> float:
        return self.longest_gap_since(0.0)

    def longest_gap_since(self, since: float) -> float:
        times = [at for at in self.times if at >= since]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def tokens_by(self, when: float) -> int:
        arrived = zip(self.times, self.counts, strict=True)
        return max((count for at, count in arrived if at <= when), default=0)


def generate(url: str, request: Request) -> Answer:
    reply = _post(url, request.body())
    return _answer(reply.json())


def generate_copies(url: str, request: Request) -> list[Answer]:
    """Answers of a request with n > 1."""
    return [_answer(item) for item in _post(url, request.body()).json()]


def generate_all(url: str, requests_: Sequence[Request], *, concurrency: int = 4) -> list[Answer]:
    """Answers in the order of the requests, `concurrency` of them under way at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: generate(url, request), requests_))


def stream(url: str, request: Request, *, on_chunk: Any = None) -> Stream:
    """One streamed request; on_chunk(index) is called as each chunk arrives."""
    texts: list[str] = []
    times: list[float] = []
    counts: list[int] = []
    last: dict[str, Any] = {}
    with requests.post(
        f"{url}/generate", json={**request.body(), "stream": True}, stream=True, timeout=TIMEOUT_S
    ) as reply:
        reply.raise_for_status()
        for chunk in _events(reply):
            last = chunk
            texts.append(chunk["text"])
            times.append(time.monotonic())
            counts.append(chunk["meta_info"]["completion_tokens"])
            if on_chunk is not None:
                on_chunk(len(times))
    return Stream(answer=_answer(last), texts=texts, times=times, counts=counts)


def in_background(url: str, request: Request, seen: list[int] | None = None) -> Future[Stream]:
    """A streamed request under way, handed out once its first tokens are there; seen gets the
    number of each chunk that comes."""
    started = threading.Event()

    def on_chunk(number: int) -> None:
        if seen is not None:
            seen.append(number)
        started.set()

    threads = ThreadPoolExecutor(1)
    future = threads.submit(stream, url, request, on_chunk=on_chunk)
    threads.shutdown(wait=False)
    assert started.wait(120), f"no token within two minutes: {request}"
    return future


@contextmanager
def streamed_beside(
    url: str, requests_: Sequence[Request]
) -> Iterator[list[tuple[Request, Answer]]]:
    """Each of them is under way all through the block: streamed, and again when it has ended. The
    list has every answer once the block is over."""
    answers: list[tuple[Request, Answer]] = []
    is_over = threading.Event()
    first = [in_background(url, request) for request in requests_]

    def ask_on(request: Request, running: Future[Stream]) -> None:
        answers.append((request, running.result().answer))
        while not is_over.is_set():
            answers.append((request, stream(url, request).answer))

    with ThreadPoolExecutor(len(requests_)) as clients:
        asking = [clients.submit(ask_on, *one) for one in zip(requests_, first, strict=True)]
        try:
            yield answers
        finally:
            is_over.set()
        for one in asking:
            one.result()


def stream_increments(url: str, request: Request) -> tuple[list[str], Answer]:
    """Of a server with --incremental-streaming-output: the pieces of text, and all of it joined."""
    body = {**request.body(), "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=TIMEOUT_S) as reply:
        reply.raise_for_status()
        chunks = list(_events(reply))
    texts = [chunk["text"] for chunk in chunks]
    ids = [token for chunk in chunks for token in chunk["output_ids"]]
    return texts, Answer(text="".join(texts), output_ids=ids, meta_info=chunks[-1]["meta_info"])


def openai(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer of an OpenAI endpoint, greedy unless the body says otherwise."""
    full = {"model": "any", "temperature": 0, **body}
    reply = requests.post(f"{url}/v1/{path}", json=full, timeout=TIMEOUT_S)
    if reply.status_code != 200:
        raise RuntimeError(f"/v1/{path} answered {reply.status_code}: {reply.text[:500]}")
    answer: dict[str, Any] = reply.json()
    return answer


def openai_stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The first choice of each chunk."""
    full = {"model": "any", "temperature": 0, "stream": True, **body}
    with requests.post(f"{url}/v1/{path}", json=full, stream=True, timeout=TIMEOUT_S) as reply:
        reply.raise_for_status()
        return [chunk["choices"][0] for chunk in _events(reply) if chunk["choices"]]


def start_and_leave(url: str, request: Request, *, after_s: float) -> None:
    """Be a client that goes away: open a stream, wait, close the connection."""
    with requests.post(
        f"{url}/generate", json={**request.body(), "stream": True}, stream=True, timeout=TIMEOUT_S
    ) as reply:
        time.sleep(after_s)
        reply.close()


def _events(reply: requests.Response) -> Any:
    for line in reply.iter_lines():
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise RuntimeError(f"the stream failed: {chunk['error']}")
        yield chunk


def _post(url: str, body: dict[str, Any]) -> requests.Response:
    reply = requests.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
    if reply.status_code != 200:
        raise RuntimeError(f"/generate answered {reply.status_code}: {reply.text[:500]}")
    return reply


def _answer(item: dict[str, Any]) -> Answer:
    return Answer(
        text=item["text"],
        output_ids=item.get("output_ids", []),
        meta_info=item["meta_info"],
        prompt_token_ids=item.get("prompt_token_ids"),
    )
