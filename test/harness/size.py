"""How much of everything: the same tests, sized for every commit or for acceptance."""

from __future__ import annotations

import os

import msgspec

SIZE_ENV = "SSD_E2E_SIZE"
"""Environment variable that chooses: "ci" (the default) or "full"."""


class Size(msgspec.Struct, frozen=True):
    num_prompts: int  # of greedy identity
    num_tokens: int
    num_seeds: int  # of sampled identity, per drafter and filter setting
    num_law_draws: int  # per filter setting
    num_disconnects: int
    num_constrained: int
    num_faults: int  # of a timed run of chaos
    soak_minutes: float
    num_frames: int  # of fuzzed wire, at each end


CI = Size(
    num_prompts=8,
    num_tokens=48,
    num_seeds=12,
    num_law_draws=200,
    num_disconnects=12,
    num_constrained=12,
    num_faults=16,
    soak_minutes=2.5,
    num_frames=3000,
)
FULL = Size(
    num_prompts=40,
    num_tokens=128,
    num_seeds=300,
    num_law_draws=1500,
    num_disconnects=60,
    num_constrained=60,
    num_faults=200,
    soak_minutes=20.0,
    num_frames=100_000,
)


def chosen_size() -> Size:
    name = os.environ.get(SIZE_ENV, "ci")
    sizes = {"ci": CI, "full": FULL}
    if name not in sizes:
        raise ValueError(f"{SIZE_ENV}={name!r}: allowed are {', '.join(sizes)}")
    return sizes[name]
