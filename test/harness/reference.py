"""What a server without drafts answers, and whether another server's answers are the same.

Equality is exact. A difference may only be rounding: asked once more, the reference must give
both tokens of a sequence's first divergence within `MAX_ROUNDING_GAP`.

What a request's rules do to logits counts in that gap. One thing of SGLang's own is left out of
requests for a reference: without overlap it applies a repetition penalty before or after the other
two, by an order of classes in a set that differs from process to process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.client import Answer, Request, generate, generate_all
from harness.server import Server, ServerPool, ServerSpec

MAX_ROUNDING_GAP = 1e-3
PROMPTS_PER_ROUNDING = 40
"""At most one sequence in so many may differ by rounding (none, if there are fewer)."""


class Divergence(msgspec.Struct, frozen=True):
    index: int
    """Of the request."""
    position: int
    """Of the first output token that differs."""
    expected: int | None
    got: int | None
    gap: float
    """Between their logprobs where the reference chose; inf if one of them is no token."""


class Reference:
    """Answers of one server, each request asked once."""

    def __init__(self, pool: ServerPool, spec: ServerSpec) -> None:
        self._pool = pool
        self.spec = spec
        self._answers: dict[bytes, Answer] = {}

    @property
    def server(self) -> Server:
        return self._pool.get(self.spec)

    def answers(self, requests: Sequence[Request], *, concurrency: int = 4) -> list[Answer]:
        missing = {key: r for r in requests if (key := _key(r)) not in self._answers}
        if missing:
            found = generate_all(self.server.url, list(missing.values()), concurrency=concurrency)
            self._answers.update(zip(missing, found, strict=True))
        return [self._answers[_key(request)] for request in requests]


def plain_reference(pool: ServerPool, model: Path, flags: tuple[str, ...] = ()) -> Reference:
    """The server without speculation: our launcher, without overlap (penalties lag under it)."""
    spec = ServerSpec(model=str(model), flags=(*flags, "--disable-overlap-schedule"))
    return Reference(pool, spec)


def find_divergence(
    server: Server, index: int, case: Request, expected: Answer, got: Answer
) -> Divergence | None:
    """First difference of the tokens, None if there is none; the server says how close it was."""
    pairs = list(_zip_longest(expected.output_ids, got.output_ids))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return None
    a, b = pairs[position]
    gap = float("inf")
    if a is not None and b is not None:
        gap = _logprob_gap(server, case, expected.output_ids[:position], a, b)
    return Divergence(index=index, position=position, expected=a, got=b, gap=gap)


def _logprob_gap(
    server: Server, case: Request, prefix: Sequence[int], first: int, second: int
) -> float:
    """Between two tokens behind this output, which the server must give again."""
    params = case.params | {"max_new_tokens": len(prefix) + 1}
    options = {"return_logprob": True, "token_ids_logprob": [first, second]}
    answer = generate(server.url, Request(case.prompt, params, options))
    if answer.output_ids[: len(prefix)] != list(prefix):
        return float("inf")
    logprobs = answer.meta_info["output_token_ids_logprobs"][len(prefix)]
    values = {token: logprob for logprob, token, *_ in logprobs}
    return abs(float(values[first] - values[second]))


def assert_same(
    reference: Reference,
    requests: Sequence[Request],
    got: Sequence[Answer],
    *,
    max_gap: float = MAX_ROUNDING_GAP,
    num_rounded: int | None = None,
) -> list[Divergence]:
    """Assert that the answers are the reference's; returns the differences that were rounding.

    Of those there may be num_rounded; left out, one in PROMPTS_PER_ROUNDING.
    """
    expected = reference.answers(requests)
    found: list[Divergence] = []
    for index, (request, want, have) in enumerate(zip(requests, expected, got, strict=True)):
        if want.same_as(have):
            continue
        divergence = find_divergence(reference.server, index, request, want, have)
        assert divergence is not None, (
            f"{request}: {want.text!r} {want.finish} became {have.text!r} {have.finish}"
        )
        found.append(divergence)
    wrong = [d for d in found if d.gap > max_gap]
    assert not wrong, f"not the reference's tokens: {wrong}"
    allowed = len(requests) // PROMPTS_PER_ROUNDING if num_rounded is None else num_rounded
    assert len(found) <= allowed, f"too many to be rounding: {found}"
    return found


def _key(request: Request) -> bytes:
    return msgspec.json.encode(request, order="deterministic")


def _zip_longest(a: list[int], b: list[int]) -> list[tuple[int | None, int | None]]:
    length = max(len(a), len(b))
    padded = [[*ids, *[None] * (length - len(ids))] for ids in (a, b)]
    return list(zip(*padded, strict=True))
