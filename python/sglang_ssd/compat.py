"""Whether the installed SGLang is one this package was tested with, and still has what it hooks.

The range is the one that our own distribution requires. `reasons` compares, beside the version,
the parameters of every function that a hook wraps or replaces and of every method that a subclass
of ours overrides: a hook on a function that changed its parameters fails late and far away.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import metadata

from packaging.requirements import Requirement

DISTRIBUTION = "sglang-ssd"

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
INTERNAL_STATE = "sglang.srt.managers.scheduler_components.internal_state"
ATTENTION_BACKEND = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
UNQUANTIZED = "sglang.srt.layers.quantization.unquant"
PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"

ATTENTION_PARAMETERS = (
    "self",
    "q",
    "k",
    "v",
    "layer",
    "forward_batch",
    "save_kv_cache",
    "kwargs",
)

HOOKED: dict[str, tuple[str, ...]] = {
    f"{SCHEDULER}.init_tp_model_worker": ("self",),
    f"{SCHEDULER}.on_idle": ("self",),
    f"{TOKENIZER_MANAGER}._send_one_request": ("self", "tokenized_obj"),
    f"{TOKENIZER_MANAGER}._create_tokenized_object": (
        "self",
        "obj",
        "input_text",
        "input_ids",
        "input_embeds",
        "mm_inputs",
        "token_type_ids",
    ),
    "sglang.srt.managers.detokenizer_manager.find_printable_text": ("text",),
    "sglang.srt.managers.schedule_batch.Req.update_finish_state": ("self", "new_accepted_len"),
    f"{TOKENIZER_MANAGER}.__init__": (
        "self",
        "server_args",
        "port_args",
        "start_pd_bootstrap_service",
    ),
    f"{INTERNAL_STATE}.SchedulerInternalStateController._add_speculative": ("self", "state"),
    f"{INTERNAL_STATE}.SchedulerInternalStateController.get_internal_state": ("self", "recv_req"),
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._accept_grammar_tokens": ("self", "req", "tokens"),
    "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info": ("self",),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._apply_token_constraints": (
        "self",
        "token_capacity",
    ),
    "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory": (
        "self",
        "input_tokens",
        "max_new_tokens",
        "token_capacity",
        "sliding_window_size",
        "chunk_size",
    ),
    "sglang.srt.mem_cache.common.release_kv_cache": ("req", "tree_cache", "checkpoint"),
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": (),
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": (
        "req_pool_indices",
        "req_to_token",
        "start_offset",
        "end_offset",
        "out_cache_loc",
        "batch_size",
    ),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".save_remote_model": ("self", "params"),
    "sglang.srt.session.session_controller.Session.create_req": (
        "self",
        "req",
        "tokenizer",
        "vocab_size",
        "eos_token_ids",
        "disagg_mode",
        "req_factory",
    ),
    "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req": (
        "self",
        "req",
    ),
    "sglang.srt.utils.numa_utils.init_threads_binding": ("numa_index", "world_size"),
    "torch.cuda.synchronize": ("device",),
}
"""Every function that a hook of ours is put on, with the parameters it was written for."""

OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo.handle_server_args": (
        "self",
        "server_args",
    ),
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo.has_draft_kv": ("self",),
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.clear_cache_pool": ("self",),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_future_map": (
        "self",
        "device",
        "req_to_token_pool",
        "needs_cpu_seq_lens",
        "needs_confidence_relay",
    ),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.carries_draft_hidden_states": ("self",),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.need_topk": ("self",),
    "sglang.srt.layers.sampler.Sampler._sample_from_probs": (
        "self",
        "probs",
        "sampling_info",
        "positions",
        "simple_sampling_case",
    ),
    f"{ATTENTION_BACKEND}.init_forward_metadata": ("self", "forward_batch"),
    f"{ATTENTION_BACKEND}.forward_extend": ATTENTION_PARAMETERS,
    f"{ATTENTION_BACKEND}.forward_decode": ATTENTION_PARAMETERS,
    f"{ATTENTION_BACKEND}.support_triton": ("self",),
    f"{UNQUANTIZED}.UnquantizedLinearMethod.apply": ("self", "layer", "x", "bias"),
    f"{UNQUANTIZED}.UnquantizedEmbeddingMethod.apply": ("self", "layer", "x", "bias"),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": ("self",),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._move_kv_cache_impl": (
        "self",
        "tgt_loc",
        "src_loc",
    ),
    f"{PLATFORM}.apply_server_args_defaults": ("self", "server_args"),
    f"{PLATFORM}.get_default_attention_backend": ("self",),
    f"{PLATFORM}.get_dispatch_key_name": ("self",),
    f"{PLATFORM}.get_kv_pool_cls": ("self", "kind"),
    f"{PLATFORM}.get_speculative_cache_locs_fn": ("self",),
    f"{PLATFORM}.post_load_model": ("self", "model"),
    "sglang.srt.platforms.device_mixin.DeviceMixin.is_pin_memory_available": ("self", "device"),
}
"""Every method that a class of ours overrides or stands in for, with the parameters it was written
for."""


def reasons() -> list[str]:
    """Why this SGLang cannot be used; empty if it can."""
    return version_reasons() or signature_reasons({**HOOKED, **OVERRIDDEN})


def version_reasons() -> list[str]:
    installed = metadata.version("sglang")
    required = tested_range()
    if Requirement(f"sglang{required}").specifier.contains(installed, prereleases=True):
        return []
    return [f"sglang {installed}: this sglang-ssd is tested with sglang{required}"]


def tested_range() -> str:
    """The versions of SGLang that our own distribution asks for, as "==0.5.23"."""
    for line in metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        if requirement.name == "sglang":
            return str(requirement.specifier)
    raise RuntimeError(f"{DISTRIBUTION} is installed without a requirement on sglang")


def signature_reasons(expected: dict[str, tuple[str, ...]]) -> list[str]:
    """One reason for each function that is gone or takes other parameters than expected."""
    found = []
    for path, parameters in expected.items():
        try:
            actual = tuple(inspect.signature(pkgutil.resolve_name(path)).parameters)
        except (ImportError, AttributeError) as error:
            found.append(f"sglang has no {path}: {error}")
            continue
        if actual != parameters:
            found.append(f"sglang's {path} takes {actual}; expected {parameters}")
    return found
