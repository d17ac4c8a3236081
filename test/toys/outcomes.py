"""Every way a round can end, forced upon a drafter whose tree is complete, and what must follow.

Ids come from the drafter's own tree, so that an event is what its name says whatever the model is.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sglang_ssd.core.speculation_cache import SpeculationCache, Taken
from toys.toy_target import Request, ToyTarget
from toys.tree import guesses


class Event(msgspec.Struct, frozen=True):
    """One ending of a round (K = 4, every position has two guesses)."""

    name: str
    ids: Callable[[SpeculationCache], list[int]]
    kind: str
    num_unfed: int
    """Tokens of the line without KV right after the outcome."""


def guess(cache: SpeculationCache, position: int, rank: int) -> list[int]:
    """The branch line c, e1 .. eK of a guess."""
    (found,) = [one for one in guesses(cache) if (one.position, one.rank) == (position, rank)]
    return found.line


def surprise(cache: SpeculationCache, position: int) -> int:
    """A token that nobody guessed after chain position `position`."""
    guessed = {guess(cache, position, rank)[0] for rank in (0, 1)} | set(cache.drafts)
    return min(token for token in range(3, 60) if token not in guessed)


def _hit(k: int, rank: int) -> Event:
    return Event(
        name=f"hit ({k}, rank {rank})",
        ids=lambda cache: [*cache.drafts[:k], guess(cache, k, rank)[0]],
        kind="hit",
        num_unfed=1,
    )


def _miss(k: int) -> Event:
    return Event(
        name=f"miss at {k}",
        ids=lambda cache: [*cache.drafts[:k], surprise(cache, k)],
        kind="miss",
        num_unfed=1,
    )


def _chain(n: int) -> Event:
    return Event(
        name=f"{n} of 4 drafts verified, all right",
        ids=lambda cache: cache.drafts[: n + 1],
        kind="chain_hit",
        num_unfed=0,
    )


EVENTS = [
    *(_hit(k, rank) for k in (0, 2, 4) for rank in (0, 1)),
    *(_miss(k) for k in (0, 2, 4)),
    *(_chain(n) for n in (0, 2, 3)),
    Event(
        name="lost commit, the next bonus is a branch's own draft",
        ids=lambda cache: [*cache.drafts[:1], *guess(cache, 1, 1)[:3]],
        kind="hit",
        num_unfed=1,
    ),
    Event(
        name="lost commit, the next bonus leaves the branch",
        ids=lambda cache: [*cache.drafts[:1], *guess(cache, 1, 0)[:3], 59],
        kind="miss",
        num_unfed=1,
    ),
    Event(
        name="lost commit, the branch was wrong from the start",
        ids=lambda cache: [*cache.drafts[:3], surprise(cache, 3), 58, 57],
        kind="miss",
        num_unfed=3,
    ),
]


def force(target: ToyTarget, request: Request, event: Event) -> Taken:
    """Commit the event's ids and let the drafter see them; no forward beyond one step has run."""
    seq = target.loop.table.find(b"target", request.rid)
    assert seq is not None
    assert seq.cache.is_built, "every event finds its branch"
    request.tokens += event.ids(seq.cache)
    seen: list[Taken] = []
    take = target.loop.table.take

    def recording_take(*args: object) -> Taken | None:
        taken = take(*args)
        seen.append(taken)
        return taken

    target.loop.table.take = recording_take
    target.commit([request])
    target.step()
    target.loop.table.take = take
    (taken,) = seen
    return taken
