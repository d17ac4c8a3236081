"""The CPU as a platform of SGLang: stock scheduler, cache, server and models on torch alone.

Asked for by SGLANG_PLATFORM=ssd_cpu. SGLang's own CPU engine needs kernels that its default wheel
does not have, and without it every `if is_cpu` of SGLang falls to Triton; this module supplies what
that leaves open. SGLang resolves the platform while it imports its arguments, so nothing here may
import more of it than the platform classes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn

from sglang_ssd.config import (
    ALGORITHM,
    CPU_PLATFORM,
    PLATFORM_ENV,
    SsdConfig,
    drafter_is_here,
    load_config,
)
from sglang_ssd.platform import affinity

logger = logging.getLogger(__name__)

PLATFORM_CLASS = f"{__name__}.SsdCpuPlatform"

DEFAULT_MEM_FRACTION = 0.5
"""SGLang plans with a device of its own; here target, drafter and everything else share the RAM."""


class SsdCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """What SGLang asks a platform for, answered for torch on CPU."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        asked_for = server_args._raw_input
        if asked_for["attention_backend"] is None:
            # SGLang has put intel_amx there, whose kernels are not in the default wheel.
            server_args.attention_backend = CPU_PLATFORM
        if asked_for["mem_fraction_static"] is None:
            server_args.mem_fraction_static = DEFAULT_MEM_FRACTION
        # A polling scheduler would take a core from the drafter, or from another server.
        server_args.sleep_on_idle = True

    def get_default_attention_backend(self) -> str:
        return CPU_PLATFORM

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang_ssd.platform.cpu_kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        return extend_cache_locs

    def get_dispatch_key_name(self) -> str:
        return CPU_PLATFORM

    def post_load_model(self, model: nn.Module) -> None:
        from sglang_ssd.platform.cpu_layer_ops import register_cpu_layer_ops
        from sglang_ssd.platform.cpu_linear import use_cpu_linear_layers

        register_cpu_layer_ops(CPU_PLATFORM)
        num_layers = use_cpu_linear_layers(model)
        logger.info("SSD: %d linear layers of this model use the kernel for few rows", num_layers)

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False


def register_attention() -> None:
    """Make --attention-backend ssd_cpu known, on any platform: every drafter runs on it."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([CPU_PLATFORM])
    register_attention_backend(CPU_PLATFORM)(_attention_backend)


def _attention_backend(model_runner: Any) -> Any:
    from sglang_ssd.platform.cpu_attention import CpuAttentionBackend

    return CpuAttentionBackend(model_runner)


def is_selected() -> bool:
    return os.environ.get(PLATFORM_ENV) == CPU_PLATFORM


def register_hooks() -> None:
    """What has no seam in SGLang's platform interface; called by the plugin on this platform."""
    affinity.lent_cores()
    HookRegistry.register(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_req_to_token,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.utils.numa_utils.init_threads_binding", bind_rank, HookType.AROUND
    )
    HookRegistry.register("torch.cuda.synchronize", wait_for_nothing, HookType.REPLACE)


def extend_cache_locs(
    *,
    req_pool_indices: Tensor,  # [B] int64
    req_to_token: Tensor,  # [rows, columns] int32
    start_offset: Tensor,  # [B] int64
    end_offset: Tensor,  # [B] int64, start_offset + draft_token_num
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> Tensor:  # [B * draft_token_num] int64
    """The slots of columns [start, end) of every row."""
    columns = start_offset[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices[:, None], columns].flatten().to(torch.int64)


def assign_req_to_token(
    req_pool_indices: Tensor,  # [B] int64
    req_to_token: Tensor,  # [rows, columns] int32, written in place
    start_offset: Tensor,  # [B] int64
    end_offset: Tensor,  # [B] int64
    out_cache_loc: Tensor,  # [sum(end - start)] int64
    batch_size: int,
) -> None:
    """Write newly reserved slots to columns [start, end) of every row."""
    lens = end_offset - start_offset
    rows = req_pool_indices.repeat_interleave(lens)
    first_column = (start_offset - (lens.cumsum(0) - lens)).repeat_interleave(lens)
    columns = first_column + torch.arange(rows.numel(), device=rows.device)
    req_to_token[rows, columns] = out_cache_loc.to(req_to_token.dtype)


def wait_for_nothing(device: object = None) -> None:
    """SGLang's release of memory waits for torch's accelerator, which of torch's CUDA build is CUDA
    though there is none: that would end the server."""


def bind_rank(original: Callable[..., str], *, numa_index: int, world_size: int) -> str:
    """Pin this TP rank: to SGLANG_CPU_OMP_THREADS_BIND if given, else to the target's cores.

    SGLang's own binding wants one NUMA node per rank unless that variable names cores for each.
    """
    from sglang.srt.runtime_context import get_parallel, get_schedule

    if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "all") != "all":
        text = original(numa_index=numa_index, world_size=world_size)
        cores, num_sharers = affinity.parse_cores(text), 1
    else:
        cores, num_sharers = _target_cores(), world_size // get_parallel().dp_size
    if world_size > 1 and get_schedule().max_total_tokens is None:
        logger.warning(
            "SSD: %d ranks share this machine's memory, but SGLang sizes the KV cache of each as "
            "if it were alone: set --max-total-tokens",
            world_size,
        )
    num_threads = affinity.pin_process(cores, num_sharers=num_sharers)
    shown = affinity.format_cores(cores)
    logger.info(
        "SSD: rank %d of %d on cores %s with %d threads; this process was lent %s",
        numa_index,
        world_size,
        shown,
        num_threads,
        affinity.format_cores(affinity.lent_cores()),
    )
    return shown


def drafter_cores(config: SsdConfig) -> str:
    """Cores for the drafter that this server starts; beside a target on an accelerator, all."""
    if not is_selected():
        return config.drafter_cores
    split = affinity.split_cores(config, affinity.lent_cores())
    return affinity.format_cores(_of_this_replica(split.drafter))


def _target_cores() -> tuple[int, ...]:
    from sglang.srt.runtime_context import get_spec

    config = load_config()
    speculates = get_spec().speculative_algorithm == ALGORITHM and config.mode != "off"
    is_beside = speculates and drafter_is_here(config)
    split = affinity.split_cores(config, affinity.lent_cores(), drafter_beside=is_beside)
    return _of_this_replica(split.target)


def _of_this_replica(cores: tuple[int, ...]) -> tuple[int, ...]:
    """What of a side's cores belongs to this process's data-parallel replica."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return affinity.share_of(cores, index=parallel.dp_rank or 0, num_shares=parallel.dp_size)
