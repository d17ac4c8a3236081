"""test/faults/soak.py: a moment for every change, two and a half minutes on each server on demand.

Speed is judged by the long run only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults import soak
from harness.server import OVERLAP, ServerPool

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
@pytest.mark.timeout(1800)  # two servers of its own
def test_a_mixed_load_leaves_nothing(target: Path, figures: dict[str, Any]) -> None:
    """Red when clients that go away leave sequences, or memory grows with every request.

    Memory settles within the first minute or so, which is half of the time here.
    """
    plain, ssd = soak.run(str(target), str(target), minutes=2.5, seed=3, warm_up_share=0.5)
    figures.update(
        growth_mb={name: ssd.growth_mb(name) for name in ("target", "drafter")},
        requests=ssd.requests,
    )
    assert set(ssd.requests) == set(soak.KINDS)
    assert soak.failures_of(plain, ssd) == []
