"""Penalties of rows that stand at different places of one request's output.

A row is chosen after the committed output and, behind it, the row's own run of drafted tokens:
row j of a verify has the run d1 .. dj, a row of the drafter's tree has its chain and branch. What
counts for a row is the committed output plus its run; the prompt never counts. In this order, as
SGLang applies them one token at a time:

    logit += -(frequency_penalty * occurrences) - (presence_penalty where occurrences > 0)
    logit  = logit * r if logit < 0 else logit / r, where occurrences > 0, r = repetition_penalty
    logit  = -inf for every stop token while the output is shorter than min_new_tokens

Only tokens that occur are touched, so the cost grows with the output, not with the vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from sglang_ssd.core.outcome_tree import IntArray

Runs = Sequence[Sequence[int]]
"""Per row the tokens behind the committed output."""


class PenaltyRule(Protocol):
    """How a request is penalised; SGLang's SamplingParams and wire.messages.DraftRule."""

    @property
    def frequency_penalty(self) -> float: ...  # 0 is off
    @property
    def presence_penalty(self) -> float: ...  # 0 is off
    @property
    def repetition_penalty(self) -> float: ...  # 1 is off
    @property
    def min_new_tokens(self) -> int: ...  # 0 is off


class OutputHistory:
    """The committed output of one request."""

    __slots__ = ("counts", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("q")  # the type that SGLang gives a request's ids
        self.counts: dict[int, int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.counts[token] = self.counts.get(token, 0) + 1


def counts_tokens(rule: PenaltyRule) -> bool:
    """Whether it matters how often a token occurred."""
    return (
        rule.frequency_penalty != 0.0
        or rule.presence_penalty != 0.0
        or rule.repetition_penalty != 1.0
    )


def is_penalised(rule: PenaltyRule) -> bool:
    return counts_tokens(rule) or rule.min_new_tokens > 0


def verify_runs(drafts: Sequence[int]) -> list[Sequence[int]]:
    """The runs of a verify's rows: nothing, d1, d1 d2, .."""
    return [drafts[:num] for num in range(len(drafts) + 1)]


def penalise_rows(
    rows: torch.Tensor,  # [R, V] float, changed in place
    *,
    rule: PenaltyRule,
    output: OutputHistory,
    runs: Runs,  # R
    stop_tokens: Collection[int],
) -> None:
    """Apply one request's penalties to its rows."""
    if counts_tokens(rule):
        tokens, occurrences = row_occurrences(output.counts, runs)
        if len(tokens):
            _penalise(rows, rule, tokens, occurrences)
    too_short = [len(output.tokens) + len(run) < rule.min_new_tokens for run in runs]
    if any(too_short) and (columns := known_tokens(stop_tokens, vocab_size=rows.shape[1])):
        masked = torch.tensor(columns, dtype=torch.int64, device=rows.device)
        where = torch.tensor(too_short, device=rows.device)[:, None]
        rows[:, masked] = rows[:, masked].masked_fill_(where, -torch.inf)


def known_tokens(tokens: Iterable[int], *, vocab_size: int) -> list[int]:
    """Those that have a logit: a client may name any number as a stop token."""
    return sorted(token for token in tokens if 0 <= token < vocab_size)


def row_occurrences(
    counts: Mapping[int, int], runs: Runs
) -> tuple[IntArray, IntArray]:  # [U], [R, U]
    """The tokens that occur before some row, and how often before each."""
    column = {token: index for index, token in enumerate(counts)}
    for run in runs:
        for token in run:
            column.setdefault(token, len(column))
    occurrences = np.zeros((len(runs), len(column)), dtype=np.int64)
    occurrences[:, : len(counts)] = np.fromiter(counts.values(), np.int64, len(counts))
    for row, run in enumerate(runs):
        for token in run:
            occurrences[row, column[token]] += 1
    return np.fromiter(column, np.int64, len(column)), occurrences


def penalty_terms(
    rule: PenaltyRule,
    occurrences: IntArray,  # [R, U]
) -> tuple[torch.Tensor, torch.Tensor]:  # [R, U] float32 each
    """What is added to a logit, and the r that then scales it (1 where nothing occurred)."""
    occurs = torch.from_numpy(occurrences > 0)
    additive = -_cumulated(rule.frequency_penalty, occurrences) - rule.presence_penalty * occurs
    return additive, torch.where(occurs, rule.repetition_penalty, 1.0)


def _penalise(
    rows: torch.Tensor,  # [R, V] float, changed in place
    rule: PenaltyRule,
    tokens: IntArray,  # [U]
    occurrences: IntArray,  # [R, U]
) -> None:
    columns = torch.from_numpy(tokens).to(rows.device)
    additive, scaling = (term.to(rows.device) for term in penalty_terms(rule, occurrences))
    values = rows[:, columns].float() + additive
    values = torch.where(values < 0, values * scaling, values / scaling)
    rows[:, columns] = values.to(rows.dtype)


def _cumulated(penalty: float, occurrences: IntArray) -> torch.Tensor:  # float32, its shape
    """penalty * occurrences as SGLang rounds it: added up in float32, one token at a time."""
    steps = np.full(int(occurrences.max()) + 1, penalty, dtype=np.float32)
    steps[0] = 0.0
    return torch.from_numpy(steps.cumsum(dtype=np.float32)[occurrences])
