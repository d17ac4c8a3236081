"""Which cores the target and the drafter compute on: on a CPU machine they stand for two devices.

Every process of a server inherits the cores that its starter was lent (taskset, a container). The
plugin asks for them once, before anything is pinned, so that the split is the same whoever computes
it. Data-parallel replicas divide each side among themselves, TP ranks share the target's cores.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

import msgspec

from sglang_ssd.config import ALLOWED_TEXTS, SsdConfig, flag_name

AUTO = "auto"


class CoreSplit(msgspec.Struct, frozen=True):
    target: tuple[int, ...]
    drafter: tuple[int, ...]


@functools.cache
def lent_cores() -> tuple[int, ...]:
    """The cores this process was started with; the first call must come before pinning."""
    return tuple(sorted(os.sched_getaffinity(0)))


def split_cores(
    config: SsdConfig, lent: tuple[int, ...], *, drafter_beside: bool = True
) -> CoreSplit:
    """What each side gets; without a drafter on this machine the target gets everything.

    Automatic and with two cores or more the sides are disjoint; the target, which is the larger
    model, gets two thirds.
    """
    if not drafter_beside:
        return CoreSplit(_chosen(config.target_cores) or lent, ())
    target, drafter = _chosen(config.target_cores), _chosen(config.drafter_cores)
    if target is None and drafter is None:
        num_drafter = max(1, len(lent) // 3)
        return CoreSplit(lent[:-num_drafter] or lent, lent[-num_drafter:])
    if target is None:
        target = _without(lent, drafter)
    if drafter is None:
        drafter = _without(lent, target)
    return CoreSplit(target, drafter)


def share_of(cores: tuple[int, ...], *, index: int, num_shares: int) -> tuple[int, ...]:
    """The cores of one replica of several: a run of them, or one in turn where there are fewer."""
    if len(cores) < num_shares:
        return (cores[index % len(cores)],)
    start, end = (len(cores) * edge // num_shares for edge in (index, index + 1))
    return cores[start:end]


def core_reasons(config: SsdConfig, lent: tuple[int, ...]) -> list[str]:
    """Reasons against the core settings on a machine that lends these cores."""
    reasons = []
    for field in ("target_cores", "drafter_cores"):
        text = getattr(config, field)
        try:
            missing = sorted(set(_chosen(text) or ()) - set(lent))
        except ValueError as error:
            reasons.append(f"{flag_name(field)} {text!r}: {error}; must be {ALLOWED_TEXTS[field]}")
            continue
        if missing:
            reasons.append(
                f"{flag_name(field)} {text!r}: no core {format_cores(missing)} here; this process "
                f"may use {format_cores(lent)}"
            )
    return reasons


def pin_process(cores: tuple[int, ...], *, num_sharers: int = 1) -> int:
    """Move every thread of this process to the cores; returns the torch threads it now uses.

    num_sharers processes (TP ranks) divide the cores' threads among themselves. OMP_NUM_THREADS
    stays an upper limit.
    """
    # The drafter splits cores before torch is loaded.
    import torch

    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # the thread ended meanwhile
            continue
    num_threads = max(1, len(cores) // num_sharers)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal() and int(limit) > 0:
        num_threads = min(num_threads, int(limit))
    torch.set_num_threads(num_threads)
    return num_threads


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0-2,5" -> (0, 1, 2, 5); ValueError with the part that is wrong."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is neither a core number nor a range")
        start, end = int(first), int(last or first)
        if end < start:
            raise ValueError(f"range {part!r} runs backwards")
        cores.update(range(start, end + 1))
    return tuple(sorted(cores))


def format_cores(cores: Iterable[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _chosen(text: str) -> tuple[int, ...] | None:
    return None if text == AUTO else parse_cores(text)


def _without(lent: tuple[int, ...], taken: tuple[int, ...] | None) -> tuple[int, ...]:
    rest = tuple(core for core in lent if core not in (taken or ()))
    return rest or lent
