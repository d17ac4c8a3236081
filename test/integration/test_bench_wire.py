"""The wire benchmark speaks the protocol as it stands: two processes, real sockets, few rounds."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import bench_wire


def test_it_measures_both_transports_and_leaves_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wire.json"
    flags = ["--rows", "1", "3", "--rounds", "20", "--host-rounds", "5", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_wire.py", *flags])
    bench_wire.main()
    printed = msgspec.json.decode(capfd.readouterr().out.splitlines()[-1])
    assert printed == msgspec.json.decode(out.read_bytes())
    assert [(row["transport"], row["num_rows"]) for row in printed["rows"]] == [
        *(("ipc", 1), ("ipc", 3)),
        *(("tcp", 1), ("tcp", 3)),
    ]
    assert all(0 < row["wire"]["p50"] <= row["wire"]["p99"] for row in printed["rows"])
    assert all(0 < row["bare"]["p50"] <= row["bare"]["p99"] for row in printed["rows"])
    assert all(0 < row["host"]["p50"] <= row["host"]["p99"] for row in printed["rows"])
