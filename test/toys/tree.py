"""A look at the guesses of a speculation cache, and what they say of its next pass."""

from __future__ import annotations

import msgspec

from sglang_ssd.core.speculation_cache import SpeculationCache


class Guess(msgspec.Struct, frozen=True):
    """One branch after s steps."""

    position: int
    rank: int
    line: list[int]  # c, e1 .. es
    slots: list[int]  # s of them


def guesses(cache: SpeculationCache) -> list[Guess]:
    """Every branch, in the order in which passes step them."""
    found = []
    for cohort in cache._cohorts:
        for row, position in enumerate(cohort.positions.tolist()):
            one = cohort.branch(row)
            found.append(Guess(position=position, rank=one.rank, line=one.line, slots=one.slots))
    return found


def ids_through_next_pass(cache: SpeculationCache) -> list[tuple[int, ...]]:
    """Per row of the next pass all ids from the prompt to the one that it feeds."""
    rows = [tuple(cache.tokens)] if cache.unfed_tokens else []
    for guess in guesses(cache):
        if len(guess.slots) < cache.num_steps:
            stem = cache.tokens[: cache.committed_len + guess.position]
            rows.append((*stem, *guess.line))
    return rows
