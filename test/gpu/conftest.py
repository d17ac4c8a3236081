"""Everything here needs an NVIDIA GPU and says so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not has_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
