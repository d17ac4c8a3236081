"""Server configurations: a pairwise table, in which any two settings meet in some row, and the few
that other tests run."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from harness.checkpoints import KINDS, DrafterKind
from harness.server import OVERLAP, ServerSpec


class Row(msgspec.Struct, frozen=True):
    drafter: DrafterKind
    num_steps: int
    overlap: bool
    backup: Literal["jit", "none"]
    fan_out_policy: Literal["uniform", "geometric"]
    chunked_prefill: int | None

    @property
    def name(self) -> str:
        overlap = "overlap" if self.overlap else "no-overlap"
        chunk = f"chunk{self.chunked_prefill}" if self.chunked_prefill else "whole"
        words = (
            self.drafter,
            f"k{self.num_steps}",
            overlap,
            self.backup,
            self.fan_out_policy,
            chunk,
        )
        return "-".join(words)


TABLE = (
    Row("self", 4, False, "jit", "uniform", 16),
    Row("noisy", 2, True, "none", "uniform", 16),
    Row("random", 7, True, "none", "geometric", None),
    Row("self", 1, False, "none", "geometric", 16),
    Row("self", 2, False, "jit", "geometric", None),
    Row("self", 7, True, "none", "uniform", None),
    Row("noisy", 1, True, "none", "uniform", None),
    Row("noisy", 4, True, "none", "geometric", None),
    Row("noisy", 7, False, "jit", "uniform", 16),
    Row("random", 1, True, "jit", "uniform", None),
    Row("random", 2, False, "none", "uniform", 16),
    Row("random", 4, False, "jit", "uniform", 16),
)
"""Every pair of two columns' values occurs in some row.

With a random drafter under backup none nearly no draft is ever verified: equality there shows that
wrong guesses disturb nothing.
"""

DRAFTERS: dict[str, tuple[DrafterKind, tuple[tuple[str, Any], ...]]] = {
    **{kind: (kind, ()) for kind in KINDS},
    "noisy-overlap": ("noisy", OVERLAP),
}
"""Drafter and settings by name, of tests that run each drafter, and one under overlap."""

FAN_OUT_LISTS = {7: (3, 2, 1, 1, 0, 1, 2, 4)}
"""By num_steps: what uniform rows say position by position; the others have the default."""


def spec_of(row: Row, spec_for: Any) -> ServerSpec:
    flags: list[str] = []
    if row.chunked_prefill:
        flags += ["--chunked-prefill-size", str(row.chunked_prefill)]
    fan_out = FAN_OUT_LISTS.get(row.num_steps) if row.fan_out_policy == "uniform" else None
    spec: ServerSpec = spec_for(
        row.drafter,
        num_steps=row.num_steps,
        flags=tuple(flags),
        settings=(
            ("backup", row.backup),
            ("fan_out_policy", row.fan_out_policy),
            *((("fan_out", fan_out),) if fan_out else ()),
            *(OVERLAP if row.overlap else ()),
        ),
    )
    return spec
