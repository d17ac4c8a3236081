"""test/faults/soak.py: a moment for every change, minutes on each server on demand.

Speed is judged at full size only, of twenty minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults import soak
from harness.server import OVERLAP, ServerPool
from harness.size import Size

SHORT_S = 15.0


def test_a_short_mixed_load_leaves_nothing(
    pool: ServerPool, spec_for: Any, figures: dict[str, Any]
) -> None:
    """Red when clients that go away leave sequences or slots, or a kind of request fails.

    On a server that test_greedy_identity.py leaves running. Memory has not settled so soon.
    """
    server = pool.get(spec_for("noisy", entry="sglang.launch_server", settings=OVERLAP))
    run = soak.soak(server, SHORT_S, seed=3, warm_up_share=0.5)
    figures.update(requests=run.requests)
    assert run.failures == []
    assert set(run.requests) == set(soak.KINDS)


@pytest.mark.slow
@pytest.mark.timeout(5400)  # two servers of its own
def test_a_mixed_load_leaves_nothing(target: Path, size: Size, figures: dict[str, Any]) -> None:
    """Red when clients that go away leave sequences, memory grows with every request, or, at full
    size, the last minutes are slower than the first.

    Memory settles within the first minute or so, which is half of a short run.
    """
    minutes = size.soak_minutes
    is_long = minutes >= soak.JUDGED_MINUTES
    warm_up_share = soak.WARM_UP_SHARE if is_long else 0.5
    plain, ssd = soak.run(
        str(target), str(target), minutes=minutes, seed=3, warm_up_share=warm_up_share
    )
    figures.update(
        growth_mb={name: ssd.growth_mb(name) for name in ("target", "drafter")},
        tokens_per_s=ssd.speeds(),
        requests=ssd.requests,
    )
    assert set(ssd.requests) == set(soak.KINDS)
    assert soak.failures_of(plain, ssd) == []
    if is_long:
        assert soak.slowdown_of(ssd) == []
