"""docs/support.md as data: what goes together with SSD, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path

import msgspec

FILE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
STATES = ("supported", "refused", "refused by SGLang", "unchecked")


class SupportRow(msgspec.Struct, frozen=True):
    feature: str
    flags: tuple[str, ...]
    """() for what is so by default."""
    state: str
    shown: str
    """The test that shows it, the message, or why it is unchecked."""


def support_rows() -> list[SupportRow]:
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("| ")]
    return [_row(line) for line in lines[2:]]


def _row(line: str) -> SupportRow:
    feature, flags, state, shown = (cell.strip() for cell in line.strip("| ").split(" | "))
    words = () if flags == "default" else tuple(flags.strip("`").split(" "))
    return SupportRow(feature, words, state, shown.strip("`"))
