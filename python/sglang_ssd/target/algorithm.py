"""The speculative algorithm SSD as SGLang registers it: what it is, its defaults and its refusals.

Validation runs while the server's arguments are resolved, before any weights load, and reports
every reason at once. What SGLang's own checks refuse earlier keeps SGLang's message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt import runtime_context
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ssd import compat
from sglang_ssd.config import (
    ALGORITHM,
    DEFAULT_NUM_STEPS,
    MAX_NUM_STEPS,
    SettingsError,
    SsdConfig,
    as_flag,
    flag_name,
    read_config,
)
from sglang_ssd.config import validate as config_reasons
from sglang_ssd.platform import affinity, cpu
from sglang_ssd.wire.curve import load_public, load_secret

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs


HONOURED_FLAGS = frozenset(
    {
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_draft_load_format",
        "speculative_draft_model_quantization",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
    }
)
"""SGLang's speculative flags that mean something here; the others must be left out."""

ALLOWED_VALUES: dict[str, tuple[object, str]] = {
    "page_size": (1, "must be 1"),
    "pp_size": (1, "must be 1"),
    "attn_dp_size": (1, "must be 1; --enable-dp-attention must be left out"),
    "attn_cp_size": (1, "must be 1"),
    "dcp_size": (1, "must be 1"),
    "enable_lora": (False, "must be left out"),
    "lora_paths": (None, "must be left out"),
    "enable_mixed_chunk": (False, "must be left out"),
    "enable_watermark": (False, "must be left out"),
    "disaggregation_mode": ("null", "must be null"),
    "tokenizer_worker_num": (1, "must be 1"),
}
"""Settings of SGLang that SSD serves with one value only."""

ALLOWED_ON_CPU: dict[str, tuple[object, str]] = {
    "kv_cache_dtype": ("auto", "must be auto on the CPU platform"),
    "enable_hierarchical_cache": (False, "must be left out on the CPU platform"),
}
"""What our CPU platform serves with one value only; on a GPU these are SGLang's own matter."""

NEEDED_ON_GPU: dict[str, tuple[object, str]] = {
    "attention_backend": ("triton", "must be triton on a GPU"),
    "disable_decode_cuda_graph": (True, "must be given on a GPU"),
}
"""A verify is as wide as its longest chain of drafts. SGLang's other backends read the full width
in its place, and its graphs know none of a plugin's verify."""


class SsdAlgorithm(CustomSpecAlgo):
    """Adds what SGLang's scheduler asks of every algorithm but its base for plugins lacks."""

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        # The drafter's KV lives in the drafter.
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: ReqToTokenPool,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args: ServerArgs) -> None:
        num_steps = _num_steps(server_args)
        server_args.speculative_num_steps = num_steps
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = num_steps + 1
        if not read_config().config.overlap:
            server_args.disable_overlap_schedule = True


def is_ssd() -> bool:
    """Whether this process is of a server that runs SSD; our hooks are in every other one too."""
    return bool(runtime_context.get_spec().speculative_algorithm == ALGORITHM)


def register() -> None:
    """Make --speculative-algorithm SSD known to SGLang."""
    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        spec_class=SsdAlgorithm,
        validate_server_args=validate_server_args,
    )(_worker_class)


def register_hooks() -> None:
    HookRegistry.register(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        widen_request_rows,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._apply_token_constraints",
        widen_kv_pool,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory",
        keep_reserve_from_answers,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
        keep_reserve_from_prompts,
        HookType.AFTER,
    )


# Every decode reserves 2 * (K + 1) slots behind what is committed. Where a request may fill its row
# or the whole pool, that many have to lie behind, or its last rounds find no room.


def widen_request_rows(extra_columns: int) -> int:
    """Room behind the context for everything that a decode reserves.

    SGLang's own K + 5 columns are fewer from K = 8 on; at the context's end the reserve would run
    into the row of the next request.
    """
    return max(extra_columns, _decode_reserve())


def widen_kv_pool(num_slots: int, configurator: Any, profiled: int) -> int:
    """Room behind --max-total-tokens, so that a request may be as long as without speculation."""
    return min(profiled, num_slots + _decode_reserve())


def keep_reserve_from_answers(
    clip: Callable[..., int | None], allocator: Any, *args: Any, token_capacity: int, **kwargs: Any
) -> int | None:
    """An answer ends where the pool without that room would end it."""
    return clip(allocator, *args, token_capacity=token_capacity - _decode_reserve(), **kwargs)


def keep_reserve_from_prompts(info: tuple[Any, ...], worker: Any) -> tuple[Any, ...]:
    """The longest request and prompt likewise; fields 4 and 5 of what the scheduler asks for."""
    capacity = worker.model_runner.effective_logical_max_total_num_tokens - _decode_reserve()
    surplus = max(0, info[4] - (capacity - 1))
    return (*info[:4], info[4] - surplus, info[5] - surplus, *info[6:])


def _decode_reserve() -> int:
    """Slots; none without SSD. SGLang asks where other algorithms decode, too."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    if not is_ssd():
        return 0
    return get_alloc_reserve_per_decode()


_start_reasons: list[str] = []


def refuse_to_start(reason: str) -> None:
    """No server of this process may start with SSD; SGLang only logs what a plugin raises."""
    _start_reasons.append(reason)


def validate_server_args(server_args: ServerArgs) -> None:
    """SettingsError with every reason why these settings cannot be served."""
    reasons = compat.reasons() or _start_reasons or setting_reasons(server_args)
    if reasons:
        raise _cannot_start(reasons)


def _cannot_start(reasons: list[str]) -> SettingsError:
    lines = "\n  ".join(reasons)
    return SettingsError(f"--speculative-algorithm {ALGORITHM} cannot start:\n  {lines}")


def setting_reasons(server_args: ServerArgs) -> list[str]:
    """Reasons against flags and config together; SGLang's fields are read as resolved so far."""
    reasons = _step_reasons(server_args) + _value_reasons(server_args)
    reasons += _foreign_flag_reasons(server_args)
    reading = read_config()
    reasons += reading.reasons
    reasons += config_reasons(reading.config, _num_steps(server_args))
    reasons += _key_reasons(reading.config)
    reasons += affinity.core_reasons(reading.config, affinity.lent_cores())
    return reasons + _model_reasons(server_args, reading.config)


def _key_reasons(config: SsdConfig) -> list[str]:
    reasons = []
    loaders: dict[str, Callable[[str], object]] = {
        "secret_key": load_secret,
        "peer_keys": load_public,
    }
    for name, load in loaders.items():
        path = getattr(config, name)
        try:
            if path is not None:
                load(path)
        except ValueError as error:
            reasons.append(f"{flag_name(name)} {error}")
    return reasons


def _num_steps(server_args: ServerArgs) -> int:
    given: int | None = server_args.speculative_num_steps
    return DEFAULT_NUM_STEPS if given is None else given


def _step_reasons(server_args: ServerArgs) -> list[str]:
    reasons = []
    num_steps = _num_steps(server_args)
    if not 1 <= num_steps <= MAX_NUM_STEPS:
        reasons.append(f"--speculative-num-steps {num_steps}: must be 1 to {MAX_NUM_STEPS}")
    if server_args.speculative_eagle_topk not in (None, 1):
        topk = server_args.speculative_eagle_topk
        reasons.append(f"--speculative-eagle-topk {topk}: must be 1 or left out")
    if server_args.speculative_num_draft_tokens not in (None, num_steps + 1):
        width = server_args.speculative_num_draft_tokens
        reasons.append(
            f"--speculative-num-draft-tokens {width}: must be {num_steps + 1} "
            "(--speculative-num-steps + 1) or left out"
        )
    return reasons


def _value_reasons(server_args: ServerArgs) -> list[str]:
    reasons = []
    on_cpu = ALLOWED_ON_CPU if cpu.is_selected() else {}
    for field, (allowed, words) in {**ALLOWED_VALUES, **on_cpu}.items():
        value = getattr(server_args, field)
        if value is not None and value != allowed:
            reasons.append(f"{as_flag(field)} {value}: {words}")
    for field, (needed, words) in ({} if cpu.is_selected() else NEEDED_ON_GPU).items():
        value = getattr(server_args, field)
        if value != needed:
            reasons.append(f"{as_flag(field)} {value}: {words}")
    return reasons


def _foreign_flag_reasons(server_args: ServerArgs) -> list[str]:
    from sglang.srt.arg_groups.fields.spec import Spec

    asked_for: dict[str, Any] = server_args._raw_input
    reasons = []
    for field in msgspec.structs.fields(Spec):
        if field.name in HONOURED_FLAGS or field.name.startswith("_"):
            continue
        value = asked_for[field.name]
        if value != field.default:
            reasons.append(f"{as_flag(field.name)} {value}: not used by SSD; must be left out")
    return reasons


def _model_reasons(server_args: ServerArgs, config: SsdConfig) -> list[str]:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    reasons = []
    starts_drafter = config.mode != "off" and config.endpoint is None
    if starts_drafter and server_args.speculative_draft_model_path is None:
        reasons.append(
            "--speculative-draft-model-path: missing; name a draft model with the target's "
            "vocabulary, or --ssd-endpoint of a running drafter, or --ssd-mode off"
        )
    model_config = model_config_of(server_args)
    model = f"--model-path {server_args.model_path}"
    if model_config.is_multimodal:
        reasons.append(f"{model}: a multimodal model; must be text only")
    if mambaish_config(model_config) is not None:  # a verify leaves its state where it was
        reasons.append(f"{model}: a model with recurrent state; must have attention alone")
    return reasons


def _worker_class(server_args: ServerArgs) -> type:
    if _start_reasons:  # of this process; what validated the arguments may have been another
        raise _cannot_start(_start_reasons)
    # The worker module needs the whole scheduler; only scheduler processes come here.
    from sglang_ssd.target.worker import SSDWorker

    return SSDWorker
