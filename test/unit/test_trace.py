"""One file for the processes of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ssd.trace import Tracer, file_of_replica, start_file


def test_a_run_begins_its_file_anew_and_every_process_adds_to_it(tmp_path: Path) -> None:
    """Red when a second run is mixed with the first, or the last process drops the others."""
    path = tmp_path / "trace.json"
    for run in range(2):
        start_file(str(path))
        for name in ("drafter", "target", "drafter again"):
            tracer = Tracer(str(path), name)
            tracer.add(f"{name} {run}", 0, 1000)
            tracer.flush()
    events = json.loads(path.read_text().rstrip(",\n") + "]")
    assert [event["name"] for event in events if event["ph"] == "X"] == [
        "drafter 1",
        "target 1",
        "drafter again 1",
    ]


def test_a_drafter_started_by_hand_begins_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Tracer(str(path), "drafter").flush()
    assert path.read_text().startswith("[\n{")


def test_the_names_of_replicas_files() -> None:
    """Red when the file of a server without replicas is not the one that was named."""
    for name, first, fourth in (
        ("run/trace.json", "run/trace.dp0.json", "run/trace.dp3.json"),
        ("/tmp/trace", "/tmp/trace.dp0", "/tmp/trace.dp3"),
    ):
        assert file_of_replica(name, dp_rank=0, dp_size=1) == name
        assert file_of_replica(name, dp_rank=0, dp_size=4) == first
        assert file_of_replica(name, dp_rank=3, dp_size=4) == fourth


def test_a_folder_that_is_gone_ends_the_tracing_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when a drafter that is started again ends by its trace."""
    path = tmp_path / "gone" / "trace.json"
    tracer = Tracer(str(path), "drafter")
    with tracer.span("a"):
        pass
    tracer.flush()
    assert caplog.messages == [
        f"--ssd-trace {path}: tracing stops: [Errno 2] No such file or directory: '{path}'"
    ]
