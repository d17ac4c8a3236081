"""Two and a half minutes of test/faults/soak.py on each server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # two servers of its own


def test_a_mixed_load_leaves_nothing(target: Path, figures: dict[str, Any]) -> None:
    """Red when clients that go away leave sequences, or memory grows with every request.

    Speed is judged by the long run only. Memory settles within the first minute or so, which is
    half of the time here.
    """
    plain, ssd = soak.run(str(target), str(target), minutes=2.5, seed=3, warm_up_share=0.5)
    figures.update(
        growth_mb={name: ssd.growth_mb(name) for name in ("target", "drafter")},
        requests=ssd.requests,
    )
    assert set(ssd.requests) == set(soak.KINDS)
    assert soak.failures_of(plain, ssd) == []
