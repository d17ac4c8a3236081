"""Who is at the other end: hello, welcome, and whether it is still the drafter that we welcomed.

    greeting   no Welcome of this drafter yet: Hello is repeated, nothing else is sent
    ready      welcomed
    refused    it will not serve us: Hello is repeated rarely, should another take its place

A drafter that we supervise is lost when its process is; one that was started by hand when it
answers HelloRequest, which is what a new process says to a target it does not know. `lives` counts
the drafters that were welcomed: when it changes, the new one knows none of our sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, Protocol

from sglang_ssd.wire.frames import Ids
from sglang_ssd.wire.messages import (
    SCHEMA_VERSION,
    DraftClose,
    DraftSync,
    Hello,
    HelloRequest,
    Refusal,
    StatusRequest,
    ToTarget,
    VerifyCommit,
    Welcome,
)
from sglang_ssd.wire.notices import NoticeLog
from sglang_ssd.wire.token_map import TOKENS_PER_BLOCK, token_block
from sglang_ssd.wire.transport import FromDrafter, Transport

logger = logging.getLogger(__name__)

Phase = Literal["greeting", "ready", "refused"]

_FIRST_HELLO_S = 0.1
_MOST_HELLO_S = 1.0


class Drafter(Protocol):
    """A drafter process of ours (supervisor.py)."""

    @property
    def pid(self) -> int: ...

    @property
    def num_starts(self) -> int: ...

    def alive(self) -> bool: ...

    def note_greeted(self) -> None: ...

    def note_ready(self, pid: int) -> None: ...

    def note_refused(self, pid: int, reason: str) -> None: ...


class DrafterLink:
    """The transport with its handshake. Owned by the DraftClient; never waits beyond its time."""

    def __init__(
        self,
        transport: Transport,
        *,
        hello: Hello,
        drafter: Drafter | None,
        tokens: list[str],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._hello = hello
        self._drafter = drafter
        self._tokens = tokens
        self._clock = clock
        self._drafter_id = ""
        self._num_starts = 0 if drafter is None else drafter.num_starts
        self._next_hello = 0.0
        self._hello_pause_s = _FIRST_HELLO_S
        self._notices = NoticeLog(logger)
        self.phase: Phase = "greeting"
        self.is_reachable = False  # whether anybody took the last message
        self.welcome: Welcome | None = None
        self.lives = 0
        self.last_error = ""

    def is_ready(self) -> bool:
        self._notice_death()
        return self.phase == "ready"

    def send(
        self, message: DraftSync | VerifyCommit | DraftClose | StatusRequest, ids: Ids | None = None
    ) -> bool:
        """False if nobody took it."""
        if not self.is_ready():
            return False
        self.is_reachable = self._transport.send(message, [] if ids is None else [ids])
        return self.is_reachable

    def receive(self, timeout_s: float) -> list[FromDrafter]:
        """Everything that arrived; what belongs to the handshake has been acted upon."""
        received = self._transport.receive(timeout_s)
        for message, _ in received:
            self._handle(message)
        return received

    def greet(self) -> None:
        """Say hello if it is time to: before the Welcome, or as a probe of a silent drafter."""
        now = self._clock()
        if now < self._next_hello or not self._has_process():
            return
        self.say_hello()
        self._next_hello = now + self._hello_pause_s
        self._hello_pause_s = min(2 * self._hello_pause_s, _MOST_HELLO_S)

    def say_hello(self) -> bool:
        """Ask who is there; False if nobody is."""
        if self._drafter is not None:
            self._drafter.note_greeted()
        self.is_reachable = self._transport.send(self._hello, [])
        return self.is_reachable

    def close(self) -> None:
        self._transport.close()

    def _handle(self, message: ToTarget) -> None:
        match message:
            case Welcome():
                self._take_welcome(message)
            case Refusal():
                if self._is_of_present(message.drafter_pid):
                    self._refuse(message.drafter_pid, self._describe(message))
            case HelloRequest():
                self._lose("it was started again and knows nothing of this target")

    def _is_of_present(self, drafter_pid: int) -> bool:
        """Whether it is said by our drafter, and not by one before it that is gone."""
        return self._drafter is None or drafter_pid == self._drafter.pid

    def _take_welcome(self, welcome: Welcome) -> None:
        if not self._is_of_present(welcome.drafter_pid):
            return
        reasons = welcome_reasons(self._hello, welcome)
        if reasons:
            self._refuse(welcome.drafter_pid, "; ".join(reasons))
            return
        is_same = welcome.drafter_id == self._drafter_id
        self._hello_pause_s = _FIRST_HELLO_S
        if is_same and self.phase == "ready":
            return
        self.phase = "ready"
        self.welcome = welcome
        self._drafter_id = welcome.drafter_id
        self.lives += 1
        if self._drafter is not None:
            self._drafter.note_ready(welcome.drafter_pid)
        logger.info("SSD drafter ready: pid %d", welcome.drafter_pid)

    def _refuse(self, drafter_pid: int, reason: str) -> None:
        self.last_error = f"the SSD drafter refuses this target: {reason}"
        self._notices.warn("refused", self.last_error)
        self.phase = "refused"
        self._hello_pause_s = _MOST_HELLO_S
        if self._drafter is not None:
            self._drafter.note_refused(drafter_pid, self.last_error)

    def _describe(self, refusal: Refusal) -> str:
        reasons = [*refusal.reasons, first_difference(self._tokens, refusal)]
        return "; ".join(reason for reason in reasons if reason)

    def _notice_death(self) -> None:
        """Forget a process of ours that ended, even if another has taken its place already."""
        drafter = self._drafter
        if drafter is None:
            return
        is_same = drafter.num_starts == self._num_starts
        if is_same and (self.phase == "greeting" or drafter.alive()):
            return
        self._num_starts = drafter.num_starts
        self._lose("the drafter process has ended")

    def _has_process(self) -> bool:
        return self._drafter is None or self._drafter.alive()

    def _lose(self, reason: str) -> None:
        self.last_error = reason
        if self.phase != "greeting":
            self.phase = "greeting"
            self._drafter_id = ""
            self._next_hello = 0.0
            self._hello_pause_s = _FIRST_HELLO_S


def welcome_reasons(hello: Hello, welcome: Welcome) -> list[str]:
    """Why a drafter that would serve us must not: it may be another than the one at the start."""
    reasons = []
    if welcome.schema_version != SCHEMA_VERSION:
        reasons.append(f"schema version {welcome.schema_version}, the target {SCHEMA_VERSION}")
    if welcome.vocab_size != hello.vocab_size and not hello.allow_padded_vocab:
        reasons.append(
            f"vocabulary size {welcome.vocab_size} of the drafter, {hello.vocab_size} of the target"
        )
    return reasons


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
