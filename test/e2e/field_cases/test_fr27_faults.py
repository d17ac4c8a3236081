"""FR-27: a drafter that hangs, dies or never comes costs a bounded wait, and comes back."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import DrafterKind
from harness.drafter_faults import assert_ends_at_start, stamp_of, strike_in_mid_stream
from harness.reference import Reference
from harness.server import Server, ServerPool, ServerSpec
from sglang_ssd.config import SettingsError, SsdConfig, build_config, from_texts

TIMEOUT_S = 5
MARGIN_S = 10
"""From the end of the weights' loading, the last thing logged before the wait, to its beginning:
the target's tokenizer is loaded meanwhile; and that a stamp is of whole seconds."""
TIMES = [name for name in SsdConfig.__struct_fields__ if name.endswith(("_ms", "_s"))]


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=lambda blow: blow.name)
def test_fr_27(
    blow: signal.Signals,
    kind: DrafterKind,
    struck_server: Server,
    reference: Reference,
    figures: dict[str, Any],
) -> None:
    """Red when a wait has no deadline, output changes, health depends on the drafter, or drafts and
    hits do not come back, of a stopped drafter or of the one that is started for a killed one."""
    figures.update(strike_in_mid_stream(kind, struck_server, reference, blow))


@pytest.mark.parametrize("value", ["-1", "0", "abc"])
def test_fr_27_bad_times(value: str) -> None:
    """Red when a time that means "for ever" or "never" is accepted."""
    for name in TIMES:
        with pytest.raises(SettingsError, match=f"--ssd-{name.replace('_', '-')} '?{value}"):
            build_config(from_texts({name: value}))


def test_fr_27_absent_at_start(target: Path, pool: ServerPool) -> None:
    """Red when a server waits for a drafter longer or shorter than it says, or does not say for
    what it waited."""
    settings = (
        ("endpoint", "ipc:///tmp/sglang-ssd-nobody-listens-here"),
        ("start_timeout_s", TIMEOUT_S),
    )
    spec = ServerSpec(model=str(target), drafter=str(target), settings=settings)
    says = (
        f"the SSD drafter was not ready within --ssd-start-timeout-s {TIMEOUT_S}; "
        "raise it for a large draft model, or see the drafter's log above"
    )
    log = assert_ends_at_start(pool, spec, says)
    begin, end = stamp_of("Load weight end", log), stamp_of("Scheduler hit an exception", log)
    assert TIMEOUT_S - 1 <= (end - begin).total_seconds() <= TIMEOUT_S + MARGIN_S
