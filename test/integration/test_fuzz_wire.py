"""A short run of test/faults/fuzz_wire.py."""

from __future__ import annotations

from faults.fuzz_wire import fuzz


def test_malformed_frames_do_no_harm() -> None:
    """Red when the decoder lets something through that breaks an end, or is no longer reached."""
    run = fuzz(num_frames=3000, seed=1)
    for tally in run.tallies.values():
        assert tally.sent == 3000
        assert tally.sent == tally.accepted + sum(tally.refused.values())
        assert tally.header_share >= 0.3
        assert {"header", "oversize", "schema_version", "columns", "id_frame"} <= set(tally.refused)
    assert run.texts_right > 0
    assert run.missed == []
    assert run.failures() == []
