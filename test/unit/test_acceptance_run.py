"""The acceptance run leaves no test out, and no broken run passes for a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

import acceptance

REPORT = '<testsuite><testcase name="one"/><testcase name="two"><skipped/></testcase></testsuite>'


def test_every_test_file_is_part_of_an_item() -> None:
    """Red when a file is added, moved or renamed and the acceptance run does not know."""
    named = [acceptance.ROOT / path for paths in acceptance.ITEMS.values() for path in paths]
    assert [path for path in named if not path.exists()] == []
    folders = [
        acceptance.ROOT / "test" / name for name in ("unit", "integration", "kernels", "e2e")
    ]
    files = {path for folder in folders for path in folder.rglob("test_*.py")}
    run = {f for path in named for f in ([path] if path.is_file() else path.rglob("test_*.py"))}
    assert files == run


@pytest.mark.parametrize(("code", "failures"), [(0, set()), (1, {"pytest"}), (2, {"pytest"})])
def test_an_interrupted_run_has_not_passed(tmp_path: Path, code: int, failures: set[str]) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    record = acceptance.read_report(report, code)
    assert (record["passed"], record["skipped"]) == (1, 1)
    assert set(record["failures"]) == failures
