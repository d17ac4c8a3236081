"""What every lane shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TOYS = frozenset({"unit", "integration"})


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_toys(request: pytest.FixtureRequest) -> Iterator[None]:
    """Toy models are so small that threads which wait for each other cost them most of their time
    on a machine that does other work."""
    num_threads = torch.get_num_threads()
    if request.path.relative_to(Path(__file__).parent).parts[0] in TOYS:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
