"""FR-37: a drafter whose ids mean other tokens stops the start, with sizes and the first such id.

A vocabulary that is larger by padding only, with the flag for it, is FR-38.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoints import Change, DrafterKind, make_broken, make_drafter
from harness.drafter_faults import assert_ends_at_start
from harness.server import ServerPool, ServerSpec


def size_of(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


@pytest.mark.parametrize(
    ("kind", "change", "first_id"),
    [("self", "swapped", 1500), ("random", "family", 1000), ("noisy", "padded", None)],
)
def test_fr_37(
    kind: DrafterKind,
    change: Change,
    first_id: int | None,
    target: Path,
    pool: ServerPool,
) -> None:
    """Red when a wrong vocabulary is noticed late, or without what is wrong with it."""
    wrong = make_broken(make_drafter(kind, target), change)
    says = ["the SSD drafter"]
    if first_id is not None:
        says.append(f"first difference: id {first_id} is")
    if size_of(wrong) != size_of(target):
        sizes = f"vocabulary size {size_of(wrong)} of the drafter, {size_of(target)} of the target"
        says += [sizes, "--ssd-allow-padded-vocab"]
    spec = ServerSpec(model=str(target), drafter=str(wrong))
    assert_ends_at_start(pool, spec, *says)
