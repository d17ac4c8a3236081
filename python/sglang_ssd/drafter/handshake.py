"""Whether this drafter can serve a target: the answer to its Hello."""

from __future__ import annotations

import os
import uuid

import msgspec

from sglang_ssd.config import MAX_NUM_STEPS, SsdConfig
from sglang_ssd.core.fan_out import resolve_fan_out
from sglang_ssd.wire.messages import MAX_REASON_CHARS, SCHEMA_VERSION, Hello, Refusal, Welcome
from sglang_ssd.wire.token_map import digest_blocks, first_differing_block, token_block


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the drafter is: its model's sizes, its tokenizer's token strings ([]: none)."""

    drafter_id: str
    vocab_size: int
    context_len: int
    tokens: list[str]
    blocks: list[str]

    @classmethod
    def of(cls, *, vocab_size: int, context_len: int, tokens: list[str]) -> Abilities:
        return cls(
            drafter_id=uuid.uuid4().hex[:12],
            vocab_size=vocab_size,
            context_len=context_len,
            tokens=tokens,
            blocks=digest_blocks(tokens),
        )


def answer_hello(hello: Hello, abilities: Abilities, *, config: SsdConfig) -> Welcome | Refusal:
    """Welcome, or all reasons against serving this target at once."""
    reasons: list[str] = []
    if hello.schema_version != SCHEMA_VERSION:
        reasons.append(
            f"schema version {hello.schema_version}, the drafter speaks {SCHEMA_VERSION}"
        )
    if 1 <= hello.num_steps <= MAX_NUM_STEPS:
        try:
            fan_out_for(config, hello.num_steps)
        except ValueError as error:
            reasons.append(str(error))
    else:
        reasons.append(f"num_steps {hello.num_steps}, allowed are 1..{MAX_NUM_STEPS}")
    reasons += _vocabulary_sizes(hello, abilities)
    block = None
    if hello.token_map_blocks and abilities.blocks:
        block = first_differing_block(abilities.blocks, hello.token_map_blocks)
    if block is not None:
        reasons.append("the drafter's tokenizer maps ids to other tokens than the target's")
    if reasons:
        return Refusal(
            reasons=[reason[:MAX_REASON_CHARS] for reason in reasons],
            block_index=-1 if block is None else block,
            block_tokens=[] if block is None else token_block(abilities.tokens, block),
            drafter_pid=os.getpid(),
        )
    return Welcome(
        schema_version=SCHEMA_VERSION,
        drafter_pid=os.getpid(),
        vocab_size=abilities.vocab_size,
        context_len=abilities.context_len,
        drafter_id=abilities.drafter_id,
    )


def fan_out_for(config: SsdConfig, num_steps: int) -> list[int]:
    """The num_steps + 1 counts, [] in mode sync, which guesses nothing. ValueError if wrong."""
    counts = resolve_fan_out(
        num_steps=num_steps,
        fan_out=config.fan_out,
        policy=config.fan_out_policy,
        acceptance_rate=config.acceptance_rate,
        power_law_exponent=config.power_law_exponent,
    )
    return [] if config.mode == "sync" else counts


def _vocabulary_sizes(hello: Hello, abilities: Abilities) -> list[str]:
    if hello.vocab_size == abilities.vocab_size or hello.allow_padded_vocab:
        return []
    return [
        f"vocabulary size {abilities.vocab_size} of the drafter, {hello.vocab_size} of the target "
        "(--ssd-allow-padded-vocab accepts vocabularies that differ in padding only)"
    ]
