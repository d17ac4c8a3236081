"""The tables of the docs say what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_ssd.config import SsdConfig, flag_name
from sglang_ssd.target.metrics import METRICS, PREFIX
from sglang_ssd.target.stats import PLAIN_CAUSES
from sglang_ssd.wire.messages import REFUSED_CAUSES

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows_of(name: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first line begins with `heading`."""
    lines = (ROOT / "docs" / name).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("| ").split(" | ")])
    return rows


def test_every_metric_is_described() -> None:
    shown = {row[0].strip("`"): row[-1] for row in rows_of("user_guide.md", "metric")}
    expected = {
        f"{PREFIX}{metric.name}{'_total' if metric.kind == 'counter' else ''}": metric.text
        for metric in METRICS
    }
    assert shown == expected


def test_every_cause_of_plain_decode_is_explained() -> None:
    causes = [row[0].strip("`") for row in rows_of("user_guide.md", "cause of plain decode")]
    assert sorted(causes) == sorted(PLAIN_CAUSES)


def test_every_cause_of_a_refusal_is_explained() -> None:
    (row,) = [row for row in rows_of("operations.md", "field") if row[0] == "`drafter_refused`"]
    assert sorted(re.findall(r"`(\w+)`", row[1])) == sorted(REFUSED_CAUSES)


def test_flags_in_the_docs_exist() -> None:
    """Red when a flag is renamed and a page still names the old one."""
    known = {flag_name(name) for name in SsdConfig.__struct_fields__}
    for path in DOCS:
        named = set(re.findall(r"--ssd-[a-z-]+[a-z]", path.read_text()))
        assert named <= known, path


def test_links_lead_somewhere() -> None:
    for path in DOCS:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
