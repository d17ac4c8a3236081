"""Whom the drafter serves, and what it says to the others."""

from __future__ import annotations

import os

import msgspec
import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.handshake import Abilities, answer_hello, fan_out_for
from sglang_ssd.wire.frames import decode_to_target, encode
from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello, Refusal, Welcome
from sglang_ssd.wire.token_map import (
    TOKENS_PER_BLOCK,
    digest_blocks,
    first_differing_block,
    token_strings,
)

TOKENS = [f"t{i}" for i in range(2 * TOKENS_PER_BLOCK + 100)]
OURS = Abilities.of(vocab_size=2200, context_len=512, tokens=TOKENS)
HELLO = Hello(
    schema_version=SCHEMA_VERSION,
    target_id="t",
    num_steps=4,
    vocab_size=2200,
    token_map_blocks=digest_blocks(TOKENS),
    allow_padded_vocab=False,
)


def ask(config: SsdConfig | None = None, **changes: object) -> Welcome | Refusal:
    hello = msgspec.structs.replace(HELLO, **changes)
    return answer_hello(hello, OURS, config=config or SsdConfig())


def test_the_same_vocabulary_is_welcome_whatever_the_contexts() -> None:
    answer = ask()
    assert isinstance(answer, Welcome)
    assert (answer.vocab_size, answer.context_len) == (2200, 512)


def test_all_reasons_come_at_once() -> None:
    answer = ask(schema_version=99, num_steps=17, vocab_size=2300)
    assert isinstance(answer, Refusal)
    assert [reason.split()[0] for reason in answer.reasons] == ["schema", "num_steps", "vocabulary"]
    assert answer.drafter_pid == os.getpid()


def test_padding_is_accepted_on_request_only() -> None:
    assert isinstance(ask(vocab_size=2304), Refusal)
    assert isinstance(ask(vocab_size=2304, allow_padded_vocab=True), Welcome)


@pytest.mark.parametrize("swapped", [5, TOKENS_PER_BLOCK + 1, 2 * TOKENS_PER_BLOCK + 98])
def test_two_swapped_tokens_are_found_and_their_block_is_sent(swapped: int) -> None:
    theirs = list(TOKENS)
    theirs[swapped], theirs[swapped + 1] = theirs[swapped + 1], theirs[swapped]
    answer = ask(token_map_blocks=digest_blocks(theirs), allow_padded_vocab=True)
    assert isinstance(answer, Refusal)
    start = answer.block_index * TOKENS_PER_BLOCK
    assert start <= swapped < start + TOKENS_PER_BLOCK
    assert answer.block_tokens[swapped - start] == f"t{swapped}"


def test_a_refusal_fits_its_message_whatever_it_tells() -> None:
    """Red when a target never hears why, because a token or a reason is too long to be sent."""
    tokens = ["x" * 5000, "a"]
    ours = Abilities.of(vocab_size=2, context_len=512, tokens=tokens)
    hello = msgspec.structs.replace(HELLO, token_map_blocks=digest_blocks(["y", "b"]))
    config = SsdConfig(fan_out=[1] * 5000)
    answer, _ = decode_to_target(encode(answer_hello(hello, ours, config=config)))
    assert isinstance(answer, Refusal)
    assert answer.block_tokens == [token[:1024] for token in tokens]


def test_a_longer_map_differs_in_its_last_block() -> None:
    assert first_differing_block(digest_blocks(TOKENS), digest_blocks([*TOKENS, "x"])) == 2
    assert first_differing_block(digest_blocks(TOKENS[:1024]), digest_blocks(TOKENS[:1025])) == 1
    assert first_differing_block([], []) is None


def test_without_a_tokenizer_on_either_side_nothing_is_compared() -> None:
    assert isinstance(ask(token_map_blocks=[]), Welcome)


def test_token_strings_fill_gaps() -> None:
    assert token_strings({"b": 2, "a": 0}) == ["a", "", "b"]
    assert token_strings({}) == []


def test_a_fan_out_of_the_wrong_length_is_refused() -> None:
    answer = ask(SsdConfig(fan_out=[1, 2, 3]))
    assert isinstance(answer, Refusal)
    assert "--ssd-fan-out" in answer.reasons[0]


def test_sync_guesses_nothing() -> None:
    assert fan_out_for(SsdConfig(mode="sync"), 4) == []
    assert fan_out_for(SsdConfig(fan_out=[2]), 4) == [2] * 5
