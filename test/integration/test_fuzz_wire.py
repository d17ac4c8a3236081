"""test/faults/fuzz_wire.py: a short run for every change, 10^5 frames at full size."""

from __future__ import annotations

from faults.fuzz_wire import Run, Tally, classify, fuzz
from harness.size import chosen_size
from sglang_ssd.wire.frames import MAX_FRAME_BYTES, encode
from sglang_ssd.wire.messages import SCHEMA_VERSION, DraftClose, StatusRequest


def test_malformed_frames_do_no_harm() -> None:
    """Red when the decoder lets something through that breaks an end, or is no longer reached."""
    num_frames = chosen_size().num_frames
    run = fuzz(num_frames=num_frames, seed=1)
    for tally in run.tallies.values():
        assert tally.sent == num_frames
        assert tally.sent == tally.accepted + sum(tally.refused.values())
        assert {"header", "oversize", "schema_version", "columns", "id_frame"} <= set(tally.refused)
    assert run.branches > 0
    assert run.failures() == []


def test_what_proves_nothing_fails() -> None:
    """Red when a long run passes whose frames end at the header, or miss a part of the decoder."""
    shallow = Tally(sent=200, refused={"header": 71, "columns": 29}, accepted=100)
    deep = Tally(sent=200, refused={"oversize": 70, "id_frame": 30}, accepted=100)
    run = Run(
        tallies={"to_drafter": deep, "to_target": shallow},
        branches_taken=9,
        branches=10,
        missed=["_decode_ids 137 jumps"],
        texts_right=0,
        rounds=5,
        resident_growth_mb=20.1,
    )
    assert run.failures() == [
        "only 29% of the frames refused to_target passed the header",
        "branch never taken: _decode_ids 137 jumps",
        "no text was finished meanwhile",
        "memory grew by 20.1 MB, allowed are 20",
    ]


def test_a_frame_of_another_version_or_size_does_not_pass_the_header() -> None:
    """Red when what is refused at the header, or not at all, counts as passing it."""
    good = encode(StatusRequest())
    tally = Tally()
    for frames in (
        good,
        [*good, b"id frames that it has not"],
        [bytes(MAX_FRAME_BYTES + 1)],
        [b"", *good],
    ):
        classify("to_drafter", frames, tally)
    version = encode(DraftClose([], []))
    classify("to_drafter", [bytes([SCHEMA_VERSION + 1]) + version[0][1:]], tally)
    assert (tally.sent, tally.accepted, tally.header_share) == (5, 1, 0.25)
    assert tally.refused == {"id_frame": 1, "oversize": 1, "header": 1, "schema_version": 1}
