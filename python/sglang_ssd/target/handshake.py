"""Bringing up the drafter: wait for it, compare vocabularies, refuse what can never draft."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Protocol

from sglang_ssd.config import SsdConfig
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello, Refusal, Welcome
from sglang_ssd.wire.token_map import TOKENS_PER_BLOCK, digest_blocks, token_block, token_strings
from sglang_ssd.wire.transport import TargetSocket, Transport

if TYPE_CHECKING:
    from sglang_ssd.trace import Tracer

logger = logging.getLogger(__name__)

_HELLO_INTERVAL_S = 1.0


class Drafter(Protocol):
    """What the handshake needs of a started drafter (drafter/process.py)."""

    endpoint: str

    def alive(self) -> bool: ...

    def exit_reason(self) -> str | None: ...


class Tokenizer(Protocol):
    """Any Hugging Face tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def connect(
    *,
    drafter: Drafter | None,
    config: SsdConfig,
    vocab_size: int,
    context_len: int,
    tokenizer: Tokenizer | None,
    num_steps: int,
    tracer: Tracer,
) -> DraftClient:
    """Client of the started drafter, or of the one that listens at config.endpoint.

    Raises RuntimeError with the reason if the drafter refuses, dies or is not there in time.
    """
    endpoint = drafter.endpoint if drafter is not None else config.endpoint
    assert endpoint is not None, "a drafter is started exactly when no endpoint is configured"
    tokens = [] if tokenizer is None else token_strings(tokenizer.get_vocab())
    hello = Hello(
        schema_version=SCHEMA_VERSION,
        target_id=uuid.uuid4().hex[:12],
        num_steps=num_steps,
        vocab_size=vocab_size,
        context_len=context_len,
        token_map_blocks=digest_blocks(tokens),
        allow_padded_vocab=config.allow_padded_vocab,
    )
    transport = TargetSocket(endpoint)
    alive = drafter.alive if drafter is not None else _always
    try:
        welcome = _wait_for_welcome(transport, hello, drafter, config.start_timeout_s, tokens)
    except BaseException:
        transport.close()
        raise
    if welcome.context_len < context_len:
        logger.warning(
            "The drafter's context (%d) is shorter than the target's (%d): "
            "requests decode plainly past it.",
            welcome.context_len,
            context_len,
        )
    logger.info("SSD drafter ready: pid %d at %s", welcome.drafter_pid, endpoint)
    return DraftClient(
        transport,
        num_steps=num_steps,
        vocab_size=vocab_size,
        reply_deadline_s=config.reply_deadline_ms / 1000,
        drafter_alive=alive,
        max_batch_size=config.max_batch_size,
        tracer=tracer,
    )


def first_difference(ours: list[str], refusal: Refusal) -> str:
    """Names the first id of the refused block whose token differs; "" if there is no block."""
    if refusal.block_index < 0:
        return ""
    start = refusal.block_index * TOKENS_PER_BLOCK
    block = token_block(ours, refusal.block_index)
    theirs = refusal.block_tokens
    for offset in range(max(len(block), len(theirs))):
        mine = block[offset] if offset < len(block) else None
        other = theirs[offset] if offset < len(theirs) else None
        if mine != other:
            return (
                f"first difference: id {start + offset} is {mine!r} for the target, "
                f"{other!r} for the drafter"
            )
    return ""


def _always() -> bool:
    return True


def _wait_for_welcome(
    transport: Transport,
    hello: Hello,
    drafter: Drafter | None,
    timeout_s: float,
    tokens: list[str],
) -> Welcome:
    deadline = time.monotonic() + timeout_s
    next_hello = 0.0
    while time.monotonic() < deadline:
        if drafter is not None and not drafter.alive():
            raise RuntimeError(f"the SSD drafter did not start: {drafter.exit_reason()}")
        if time.monotonic() >= next_hello:
            transport.send(hello, [])
            next_hello = time.monotonic() + _HELLO_INTERVAL_S
        for message, _ in transport.receive(0.2):
            if isinstance(message, Welcome):
                return message
            if isinstance(message, Refusal):
                reasons = [*message.reasons, first_difference(tokens, message)]
                raise RuntimeError(
                    "the SSD drafter refuses this target: " + "; ".join(r for r in reasons if r)
                )
    raise RuntimeError(
        f"the SSD drafter was not ready within --ssd-start-timeout-s {timeout_s:g}; "
        "raise it for a large draft model, or see the drafter's log above"
    )
