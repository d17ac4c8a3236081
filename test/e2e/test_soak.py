"""A minute of test/faults/soak.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faults import soak


def test_a_mixed_load_leaves_nothing(target: Path, figures: dict[str, Any]) -> None:
    """Red when clients that go away leave sequences, or memory grows with every request.

    Speed is judged by the long run only.
    """
    plain, ssd = soak.run(str(target), str(target), minutes=1.0, seed=3)
    figures.update(
        growth_mb={name: ssd.growth_mb(name) for name in ("target", "drafter")},
        requests=ssd.requests,
    )
    assert set(ssd.requests) == set(soak.KINDS)
    assert soak.failures_of(plain, ssd) == []
