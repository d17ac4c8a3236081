"""The entry points that SGLang finds in every process: the plugin and the CPU platform.

SGLang only logs what a plugin raises, so `register` always registers the algorithm and leaves every
refusal to the algorithm's validation, which runs when the server's arguments are resolved.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from sglang_ssd.config import CPU_PLATFORM, PLATFORM_ENV

_registered = False


def activate_cpu_platform() -> str | None:
    """The platform's class if SGLANG_PLATFORM asks for it; None leaves a GPU machine alone."""
    if os.environ.get(PLATFORM_ENV) != CPU_PLATFORM:
        return None
    from sglang_ssd.platform import cpu

    return cpu.PLATFORM_CLASS


def register() -> None:
    """Make the algorithm, the attention backend and every hook known; safe to call again."""
    global _registered
    if _registered:
        return
    _registered = True
    end_if_orphaned()
    from sglang_ssd import compat
    from sglang_ssd.platform import cpu
    from sglang_ssd.target import algorithm

    algorithm.register()
    try:
        cpu.register_attention()
        if not compat.version_reasons():
            _register_hooks()
    except Exception as error:
        algorithm.refuse_to_start(f"hooks: {type(error).__name__}: {error}")
        raise


def _register_hooks() -> None:
    from sglang_ssd.platform import cpu
    from sglang_ssd.target import algorithm, hooks, refusals, request_hooks, session_hooks

    algorithm.register_hooks()
    hooks.register_hooks()
    refusals.register_hooks()
    request_hooks.register_hooks()
    session_hooks.register_hooks()
    if cpu.is_selected():
        cpu.register_hooks()


def end_if_orphaned() -> None:
    """End a child of a server that was stopped while the child was still importing SGLang.

    SGLang asks the kernel to end it with its parent, right before it loads plugins; of a parent
    that has ended by then the kernel says nothing, and the child would wait for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit(f"sglang-ssd: the server {parent.pid} ended while this process was starting")
