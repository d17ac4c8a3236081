"""How many drafts a row is answered with, and under which name: the backup speculator's decision.

    outcome             backup jit    backup none     mode sync
    hit, chain_hit      K             K               K "sync"
    miss                K "jit"       0 "none"        K "sync"
    long way behind     0 "prefill"   0 "prefill"     K "sync"

A hit whose branch is only partly drafted is finished with single-row steps: the longest part is
there. A row that is far behind (its prompt is still being prefilled) is answered at once without
drafts, for the whole batch would wait for it. Ordinary speculative decoding does wait.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_ssd.core.speculation_cache import OutcomeClass
from sglang_ssd.wire.messages import Served

_CATCH_UP_ROUNDS = 4


def most_catch_up(num_steps: int) -> int:
    """Unfed tokens that a batch still waits for: a few lost rounds, not a prompt."""
    return _CATCH_UP_ROUNDS * (num_steps + 1)


class Answer(msgspec.Struct, frozen=True):
    """num_drafts to have before the row is answered, as `served`."""

    num_drafts: int
    served: Served


def plan_answer(
    kind: OutcomeClass,
    *,
    mode: Literal["async", "sync", "off"],
    backup: Literal["jit", "none"],
    num_steps: int,
    num_unfed: int,
) -> Answer:
    """See the table above."""
    if mode == "sync":
        return Answer(num_drafts=num_steps, served="sync")
    if num_unfed > most_catch_up(num_steps):
        return Answer(num_drafts=0, served="prefill")
    if kind != "miss":
        return Answer(num_drafts=num_steps, served=kind)
    if backup == "jit":
        return Answer(num_drafts=num_steps, served="jit")
    return Answer(num_drafts=0, served="none")
