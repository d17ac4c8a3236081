"""The round timeline: rounds found in a trace, drafting time under a verify, and the picture."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import plot
import timeline
from sglang_ssd.trace import Tracer

MS = 1_000_000
HOST, VERIFY, STEP, WAIT = 2, 100, 30, 40


def write_round(target: Tracer, drafter: Tracer, start: int, *, hit: bool) -> int:
    """One round of a target that verifies for 100 ms; returns when the next one starts, in ms."""
    target.add("verify", start * MS, (start + VERIFY) * MS, rows=1, width=3)
    for step in range(3):
        begin = start + 1 + step * STEP
        drafter.add("branch step", begin * MS, (begin + STEP) * MS, rows=9, sequences=1)
    now = start + VERIFY
    target.add("accept", now * MS, (now + 1) * MS)
    now += HOST
    if hit:
        target.add("wait for drafts", now * MS, now * MS, rows=1)
        return now
    drafter.add("decode", now * MS, (now + WAIT) * MS, rows=1, tokens=1)
    target.add("wait for drafts", now * MS, (now + WAIT) * MS, rows=1)
    return now + WAIT


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prefill, hit, hit, miss, prefill of another request, hit, start of a last round."""
    path = tmp_path / "trace.json"
    target, drafter = Tracer(str(path), "target"), Tracer(str(path), "drafter")
    target.flush()
    drafter._pid += 1  # two processes
    drafter._events[0]["pid"] = drafter._pid
    target.add("prefill", 0, 50 * MS, tokens=20)
    drafter.add("prefill slice", 0, 20 * MS, rows=1, tokens=20)
    now = 1000
    for hit in (True, True, False):
        now = write_round(target, drafter, now, hit=hit)
    now = write_round(target, drafter, now, hit=True)
    target.add("prefill", now * MS, (now + 50) * MS, tokens=20)
    now = write_round(target, drafter, now + 50, hit=True)
    write_round(target, drafter, now, hit=True)
    target.flush()
    drafter.flush()
    return path


def test_a_round_with_a_prefill_is_none_and_times_add_up(trace: Path) -> None:
    rounds = timeline.find_rounds(timeline.read_trace(trace))
    durations = [one.duration for one in rounds]
    assert durations == pytest.approx([102, 102, 142, 102])  # the fourth round had the prefill
    assert [one.wait for one in rounds] == pytest.approx([0, 0, 40, 0])
    assert [one.host for one in rounds] == pytest.approx([2, 2, 2, 2])
    assert [one.verify for one in rounds] == pytest.approx([100] * 4)


def test_drafting_is_under_verify_but_for_the_miss(trace: Path) -> None:
    spans = timeline.read_trace(trace)
    share = timeline.drafting_under_verify(spans, timeline.find_rounds(spans))
    assert share == pytest.approx(4 * 90 / (4 * 90 + 40))  # prefill slices do not count


def test_time_under_counts_only_the_overlap() -> None:
    def span(start: float, end: float) -> timeline.Span:
        return timeline.Span(process="", name="", start=start, end=end, args={})

    covers = [span(0, 10), span(20, 30)]
    assert timeline.time_under([span(5, 25)], covers) == 10
    assert timeline.time_under([span(10, 20), span(30, 40)], covers) == 0


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('[\n{"ph":"M","name":"process_name","pid":1,"args":{"name":"target"}},\nx\n')
    with pytest.raises(ValueError, match="line 3"):
        timeline.read_trace(path)


def test_the_window_holds_rounds_that_follow_each_other(trace: Path) -> None:
    rounds = timeline.find_rounds(timeline.read_trace(trace))
    assert plot.choose_window(rounds, 3, None) == rounds[:3]
    with pytest.raises(ValueError, match="no 4 rounds in a row"):
        plot.choose_window(rounds, 4, None)


def test_the_command_draws_a_png_and_prints_the_share(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra: bench)")
    out = tmp_path / "docs" / "timeline.png"
    monkeypatch.setattr(sys, "argv", ["plot.py", str(trace), "--out", str(out), "--rounds", "3"])
    plot.main()
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert printed["drafting_under_verify"] == pytest.approx(0.9)
