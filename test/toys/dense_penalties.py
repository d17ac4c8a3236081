"""A server's own way to penalise: dense rows that grow with every token, one row at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class DensePenalties:
    """What SGLang's penalizers of one request do; `rule` has the names of its parameters."""

    def __init__(self, rule: Any, *, vocab_size: int, stop_tokens: Iterable[int] = ()) -> None:
        self._rule = rule
        self._stop_tokens = sorted(stop_tokens)
        self._frequency = torch.zeros(vocab_size)
        self._presence = torch.zeros(vocab_size)
        self._scaling = torch.ones(vocab_size)
        self._num_tokens = 0

    def accumulate(self, token: int) -> None:
        self._frequency[token] += self._rule.frequency_penalty
        self._presence[token] = self._rule.presence_penalty
        self._scaling[token] = self._rule.repetition_penalty
        self._num_tokens += 1

    def apply(
        self,
        logits: torch.Tensor,  # [V]
    ) -> torch.Tensor:  # [V]
        logits = logits + (0 - self._frequency - self._presence)
        if self._num_tokens < self._rule.min_new_tokens:
            logits[self._stop_tokens] = -torch.inf
        return torch.where(logits < 0, logits * self._scaling, logits / self._scaling)
