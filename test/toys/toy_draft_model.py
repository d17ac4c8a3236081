"""A two-layer transformer with real KV slots that stands in for SGLang's model in the drafter's
tests.

float64, so that what should be equal differs by rounding only. Two layers: one layer hides wrong
masks. `reference` is an independent, slot-free causal forward over the same weights; it also
serves as target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_ssd.drafter.model_step import BranchRows, ExtendRow

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
HIDDEN = HEADS * HEAD_DIM


class ToyDraftModel:
    """Implements ModelStep; `calls` counts forwards by kind."""

    def __init__(
        self,
        *,
        vocab_size: int = 61,
        context_len: int = 400,
        total_slots: int = 3000,
        seed: int = 0,
        sharpness: float = 3.0,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.total_slots = total_slots
        self.calls: list[tuple[str, int]] = []
        rng = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64) / shape[-1] ** 0.5

        self.embed = weight(vocab_size, HIDDEN) * HIDDEN**0.5
        self.q = weight(LAYERS, HIDDEN, HIDDEN)
        self.k = weight(LAYERS, KV_HEADS * HEAD_DIM, HIDDEN)
        self.v = weight(LAYERS, KV_HEADS * HEAD_DIM, HIDDEN)
        self.o = weight(LAYERS, HIDDEN, HIDDEN)
        self.up = weight(LAYERS, 2 * HIDDEN, HIDDEN)
        self.down = weight(LAYERS, HIDDEN, 2 * HIDDEN)
        self.head = weight(vocab_size, HIDDEN) * sharpness
        # NaN: whatever was never written must not be read.
        shape = (LAYERS, 2, total_slots + 1, KV_HEADS, HEAD_DIM)
        self.storage = torch.full(shape, float("nan"), dtype=torch.float64)

    def extend(self, rows: Sequence[ExtendRow]) -> torch.Tensor:
        self.calls.append(("extend", sum(len(row.token_ids) for row in rows)))
        plans = []
        for row in rows:
            total = len(row.kv_slots)
            assert total == row.start + len(row.token_ids)
            query = torch.arange(row.start, total)
            plans.append((row.kv_slots, torch.arange(total)[None, :] <= query[:, None]))
        ids = np.concatenate([row.token_ids for row in rows])
        positions = np.concatenate(
            [np.arange(row.start, row.start + len(row.token_ids)) for row in rows]
        )
        logits = self._forward(ids, positions, plans)
        last = torch.tensor([len(row.token_ids) for row in rows]).cumsum(0) - 1
        return logits[last]

    def branch_step(self, rows: Sequence[BranchRows]) -> torch.Tensor:
        self.calls.append(("branch", sum(len(row.token_ids) for row in rows)))
        ids = np.concatenate([row.token_ids for row in rows])
        positions = np.concatenate([row.positions for row in rows])
        return self._forward(ids, positions, [(row.kv_slots, row.mask) for row in rows])

    def kv(self, slots: Sequence[int]) -> torch.Tensor:  # [LAYERS, 2, T, KV_HEADS, HEAD_DIM]
        return self.storage[:, :, torch.as_tensor(list(slots), dtype=torch.int64)]

    def reference(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, V] and KV [LAYERS, 2, T, ..] of a plain causal forward that knows no slots."""
        x = self.embed[torch.as_tensor(list(tokens))]
        length = len(x)
        positions = torch.arange(length)
        banned = torch.ones(length, length, dtype=torch.bool).triu(1)
        kept = []
        for layer in range(LAYERS):
            y = _norm(x)
            q = _rotate((y @ self.q[layer].T).view(length, HEADS, HEAD_DIM), positions)
            k = _rotate((y @ self.k[layer].T).view(length, KV_HEADS, HEAD_DIM), positions)
            v = (y @ self.v[layer].T).view(length, KV_HEADS, HEAD_DIM)
            kept.append(torch.stack([k, v]))
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
            out = torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(banned, float("-inf")).softmax(-1), v
            )
            x = x + out.reshape(length, HIDDEN) @ self.o[layer].T
            x = x + (_norm(x) @ self.up[layer].T).relu() @ self.down[layer].T
        return _norm(x) @ self.head.T, torch.stack(kept)

    def _forward(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        plans: list[tuple[np.ndarray, torch.Tensor]],
    ) -> torch.Tensor:
        x = self.embed[torch.from_numpy(ids)]
        pos = torch.from_numpy(positions)
        new = torch.from_numpy(np.concatenate([slots[-len(mask) :] for slots, mask in plans]))
        assert (new > 0).all(), "slot 0 is padding"
        for layer in range(LAYERS):
            y = _norm(x)
            q = _rotate((y @ self.q[layer].T).view(-1, HEADS, HEAD_DIM), pos)
            k = _rotate((y @ self.k[layer].T).view(-1, KV_HEADS, HEAD_DIM), pos)
            self.storage[layer, 0, new] = k
            self.storage[layer, 1, new] = (y @ self.v[layer].T).view(-1, KV_HEADS, HEAD_DIM)
            out, start = torch.empty_like(q), 0
            for slots, mask in plans:
                end = start + len(mask)
                out[start:end] = self._attend(layer, q[start:end], torch.from_numpy(slots), mask)
                start = end
            x = x + out.reshape(-1, HIDDEN) @ self.o[layer].T
            x = x + (_norm(x) @ self.up[layer].T).relu() @ self.down[layer].T
        return _norm(x) @ self.head.T

    def _attend(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        k, v = (
            self.storage[layer, i, slots].repeat_interleave(HEADS // KV_HEADS, dim=1)
            for i in (0, 1)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = _ROTARY[positions].unbind(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos[:, None] - b * sin[:, None], a * sin[:, None] + b * cos[:, None]], -1)


def _rotary_table(num_positions: int) -> torch.Tensor:  # [positions, 2, HEAD_DIM / 2]
    half = HEAD_DIM // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1)


_ROTARY = _rotary_table(2000)
