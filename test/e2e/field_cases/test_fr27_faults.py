"""FR-27: a drafter that hangs, dies or never comes costs a bounded wait, and comes back."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from harness.drafter_faults import assert_ends_at_start, strike_in_mid_stream
from harness.reference import Reference
from harness.server import Server, ServerPool, ServerSpec
from sglang_ssd.config import SettingsError, SsdConfig, build_config, from_texts

TIMES = [name for name in SsdConfig.__struct_fields__ if name.endswith(("_ms", "_s"))]


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=lambda blow: blow.name)
def test_fr_27(
    blow: signal.Signals, struck_server: Server, reference: Reference, figures: dict[str, Any]
) -> None:
    """Red when a wait has no deadline, output changes, health depends on the drafter, or drafts
    do not come back, of a stopped drafter or of the one that is started for a killed one."""
    figures.update(strike_in_mid_stream(struck_server, reference, blow))


@pytest.mark.parametrize("value", ["-1", "0", "abc"])
def test_fr_27_bad_times(value: str) -> None:
    """Red when a time that means "for ever" or "never" is accepted."""
    for name in TIMES:
        with pytest.raises(SettingsError, match=f"--ssd-{name.replace('_', '-')} '?{value}"):
            build_config(from_texts({name: value}))


def test_fr_27_absent_at_start(target: Path, pool: ServerPool) -> None:
    """Red when a server waits for a drafter without end, or does not say for what it waited."""
    settings = (("endpoint", "ipc:///tmp/sglang-ssd-nobody-listens-here"), ("start_timeout_s", 3))
    spec = ServerSpec(model=str(target), drafter=str(target), settings=settings)
    assert_ends_at_start(pool, spec, "--ssd-start-timeout-s 3")
