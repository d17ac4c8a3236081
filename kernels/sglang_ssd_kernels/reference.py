"""Torch references: what every op means, and how it runs where no kernel of ours does."""

from __future__ import annotations

import functools

import torch

_C1, _C2 = 0xCC9E2D51, 0x1B873593
_ADD = 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
_KEY_BYTES = 16


def murmur_hash32(
    seeds: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
    token_ids: torch.Tensor,  # [R, M] or [1, M] int64
) -> torch.Tensor:  # [R, M] int32, the bits of the uint32 hash
    """Murmur3 of (seed low, seed high, position, token id), as SGLang's seeded sampler hashes.

    Bit-equal to `murmur_hash32` of sglang/kernels/ops/sampling/murmur_hash.py. All arithmetic wraps
    in int32, which is the same as modulo 2 ** 32.
    """
    return _hash_mixed(seeds, positions, _mix_key(token_ids.to(torch.int32)))


def murmur_hash32_all(
    seeds: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64
    num_tokens: int,
) -> torch.Tensor:  # [R, num_tokens] int32
    """murmur_hash32 of every token id below num_tokens."""
    return _hash_mixed(seeds, positions, _mixed_ids(num_tokens, seeds.device))


def _hash_mixed(
    seeds: torch.Tensor, positions: torch.Tensor, mixed_ids: torch.Tensor
) -> torch.Tensor:
    state = torch.zeros_like(seeds, dtype=torch.int32)
    for key in (seeds, seeds >> 32, positions):
        state = _mix_state(state ^ _mix_key(key.to(torch.int32)))
    # In place: for a whole vocabulary, fresh memory would cost more than the arithmetic.
    bits = _mix_state(state[:, None] ^ mixed_ids).bitwise_xor_(_KEY_BYTES)
    bits.bitwise_xor_(_shift_right(bits, 16)).mul_(_signed(_F1))
    bits.bitwise_xor_(_shift_right(bits, 13)).mul_(_signed(_F2))
    return bits.bitwise_xor_(_shift_right(bits, 16))


@functools.lru_cache(maxsize=4)
def _mixed_ids(num_tokens: int, device: torch.device) -> torch.Tensor:  # [1, num_tokens] int32
    return _mix_key(torch.arange(num_tokens, dtype=torch.int32, device=device))[None, :]


def _mix_key(key: torch.Tensor) -> torch.Tensor:
    return _rotate_left_(key * _signed(_C1), 15).mul_(_signed(_C2))


def _mix_state(state: torch.Tensor) -> torch.Tensor:
    """Consumes its argument."""
    return _rotate_left_(state, 13).mul_(5).add_(_signed(_ADD))


def _rotate_left_(bits: torch.Tensor, count: int) -> torch.Tensor:
    low = _shift_right(bits, 32 - count)
    return bits.bitwise_left_shift_(count).bitwise_or_(low)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int32, whose own shift copies the sign."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 32) if constant >= 1 << 31 else constant
