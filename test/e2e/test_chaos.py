"""Two minutes of test/faults/chaos.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faults import chaos


def test_faults_cost_speed_and_nothing_else(target: Path, figures: dict[str, Any]) -> None:
    """Red when a fault changes or loses an answer, keeps hits away, or leaves something behind."""
    result = chaos.run(str(target), num_faults=16, seed=2)
    figures.update(hit_share=result.hit_share, answers=result.num_answers, rows=result.rows)
    assert result.failures() == []
    assert len(result.outcomes) == 16
