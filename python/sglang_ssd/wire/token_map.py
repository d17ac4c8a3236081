"""A vocabulary as both ends of the handshake see it: tokens by id, and hashes of blocks of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

TOKENS_PER_BLOCK = 1024
MAX_TOKEN_CHARS = 1024
"""Of a token as it is told the other end, which logs it."""


def token_strings(vocab: Mapping[str, int]) -> list[str]:
    """Token string of every id up to the largest, "" for ids without one."""
    by_id = {index: token for token, index in vocab.items()}
    return [by_id.get(index, "") for index in range(max(by_id, default=-1) + 1)]


def digest_blocks(tokens: Sequence[str]) -> list[str]:
    """sha256 per TOKENS_PER_BLOCK ids, so that two maps can be compared and narrowed to a block."""
    return [
        hashlib.sha256("\0".join(_block(tokens, index)).encode()).hexdigest()
        for index in range(-(-len(tokens) // TOKENS_PER_BLOCK))
    ]


def token_block(tokens: Sequence[str], index: int) -> list[str]:
    """To be told the other end, and compared with what it tells: long tokens are cut."""
    return [token[:MAX_TOKEN_CHARS] for token in _block(tokens, index)]


def _block(tokens: Sequence[str], index: int) -> Sequence[str]:
    return tokens[index * TOKENS_PER_BLOCK : (index + 1) * TOKENS_PER_BLOCK]


def first_differing_block(ours: Sequence[str], theirs: Sequence[str]) -> int | None:
    """Of two lists of block hashes; None if they agree."""
    for index in range(max(len(ours), len(theirs))):
        if ours[index : index + 1] != theirs[index : index + 1]:
            return index
    return None
