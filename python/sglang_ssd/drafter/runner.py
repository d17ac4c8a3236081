"""SGLang's ModelRunner as a ModelStep: one draft model in a process of its own, without a
scheduler.

The runner's pools are storage only. Every forward states its attention as a plan of slots (the tree
mask of a branch step included), so neither req_to_token nor the pool's allocator is ever asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.benchmark.one_batch import _init_process_global_configs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer
from sglang.srt.utils.network import get_free_port_below_ephemeral

from sglang_ssd.config import CPU_PLATFORM
from sglang_ssd.drafter.checkpoint import check_architecture
from sglang_ssd.drafter.footprint import cpu_kv_slots
from sglang_ssd.drafter.model_step import BranchRows, ExtendRow
from sglang_ssd.platform.attention_plan import PlanRow
from sglang_ssd.wire.token_map import token_strings

if TYPE_CHECKING:
    from sglang_ssd.core.outcome_tree import IntArray
    from sglang_ssd.drafter.process import DrafterSettings

logger = logging.getLogger(__name__)


class PlannedForward:
    """The spec_info of our forwards: what the attention backend reads, nothing else."""

    capture_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, attention_plan: tuple[PlanRow, ...]) -> None:
        self.attention_plan = attention_plan

    def is_draft_input(self) -> bool:
        return False

    def is_verify_input(self) -> bool:
        return True


class SglangModelStep:
    """See the module docstring. One per process: SGLang's configuration is process-wide."""

    def __init__(self, settings: DrafterSettings, *, device: str, max_sequences: int) -> None:
        server_args = _server_args(settings, device=device, max_sequences=max_sequences)
        port = get_free_port_below_ephemeral()
        publish(
            server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=settings.gpu_id)
        )
        _init_process_global_configs()
        model_config = _model_config(server_args)
        bootstrap.init_parallel_runtime(server_args=server_args, device=device, dist_port=port)
        bootstrap.init_layer_runtime(model_config=model_config)
        self._runner = ModelRunner(
            model_config=model_config,
            mem_fraction_static=settings.mem_fraction,
            gpu_id=settings.gpu_id,
            nccl_port=port,
            server_args=server_args,
        )
        self._runner.alloc_memory_pool()
        self._runner.init_attention_backends()
        self._runner.init_cuda_graphs()
        self._device = torch.device(device)
        self.vocab_size: int = model_config.vocab_size
        self.context_len: int = model_config.context_len
        self.total_slots: int = self._runner.max_total_num_tokens

    @property
    def kv_pool(self) -> Any:
        """SGLang's storage, for tests that look at the KV itself."""
        return self._runner.token_to_kv_pool

    @torch.inference_mode()
    def extend(self, rows: Sequence[ExtendRow]) -> torch.Tensor:  # [B, V] float32
        widths = [len(row.token_ids) for row in rows]
        plan, q_start = [], 0
        for row, width in zip(rows, widths, strict=True):
            plan.append(PlanRow(q_start, q_start + width, self._tensor(row.kv_slots), causal=True))
            q_start += width
        starts = np.array([row.start for row in rows], dtype=np.int64)
        batch = self._batch(
            ForwardMode.EXTEND,
            token_ids=np.concatenate([row.token_ids for row in rows]),
            positions=np.concatenate(
                [np.arange(row.start, row.start + n) for row, n in zip(rows, widths, strict=True)]
            ),
            new_slots=np.concatenate(
                [row.kv_slots[-n:] for row, n in zip(rows, widths, strict=True)]
            ),
            kv_lens=starts + np.array(widths, dtype=np.int64),
            plan=plan,
        )
        batch.extend_num_tokens = q_start
        batch.extend_seq_lens = self._tensor(np.array(widths, dtype=np.int32))
        batch.extend_prefix_lens = self._tensor(starts.astype(np.int32))
        batch.extend_start_loc = batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens
        batch.extend_seq_lens_cpu = widths
        batch.extend_prefix_lens_cpu = starts.tolist()
        batch.extend_logprob_start_lens_cpu = widths
        return self._logits(batch)

    @torch.inference_mode()
    def branch_step(self, rows: Sequence[BranchRows]) -> torch.Tensor:  # [sum R, V] float32
        plan, q_start = [], 0
        for row in rows:
            q_end = q_start + len(row.token_ids)
            mask = row.mask.to(self._device)
            plan.append(PlanRow(q_start, q_end, self._tensor(row.kv_slots), mask=mask))
            q_start = q_end
        batch = self._batch(
            ForwardMode.TARGET_VERIFY,
            token_ids=np.concatenate([row.token_ids for row in rows]),
            positions=np.concatenate([row.positions for row in rows]),
            new_slots=np.concatenate([row.kv_slots[-len(row.token_ids) :] for row in rows]),
            kv_lens=np.array([len(row.kv_slots) for row in rows]),
            plan=plan,
        )
        return self._logits(batch)

    def _batch(
        self,
        mode: ForwardMode,
        *,
        token_ids: IntArray,
        positions: IntArray,
        new_slots: IntArray,
        kv_lens: IntArray,
        plan: list[PlanRow],
    ) -> Any:  # ForwardBatch
        seq_lens_cpu = torch.from_numpy(kv_lens)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(kv_lens),
            input_ids=self._tensor(token_ids),
            req_pool_indices=torch.zeros(len(kv_lens), dtype=torch.int64, device=self._device),
            seq_lens=seq_lens_cpu.to(self._device),
            out_cache_loc=self._tensor(new_slots),
            seq_lens_sum=int(kv_lens.sum()),
        )
        batch.positions = self._tensor(positions)
        batch.seq_lens_cpu = seq_lens_cpu
        batch.orig_seq_lens = batch.seq_lens
        batch.capture_hidden_mode = CaptureHiddenMode.NULL
        batch.spec_algorithm = SpeculativeAlgorithm.NONE
        batch.spec_info = PlannedForward(tuple(plan))
        return batch

    def _logits(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self._runner.forward(batch).logits_output.next_token_logits
        return logits.float()

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def load_tokens(settings: DrafterSettings) -> list[str]:
    """The tokenizer's token strings by id; [] with a warning if the checkpoint has none."""
    try:
        tokenizer = get_tokenizer(
            settings.model_path,
            tokenizer_revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        logger.warning("token-to-id maps are not compared, the draft has no tokenizer: %s", error)
        return []
    return token_strings(tokenizer.get_vocab())


def _model_config(server_args: ServerArgs) -> Any:  # ModelConfig
    model_config = ModelConfig.from_server_args(server_args)
    check_architecture(model_config.hf_config.architectures)
    return model_config


def _server_args(settings: DrafterSettings, *, device: str, max_sequences: int) -> ServerArgs:
    """On a CPU, whose memory is the target's too, as many KV slots as our own share holds.

    On a device SGLang takes mem_fraction of what is free.
    """
    num_slots = settings.max_total_tokens
    args = _resolved(settings, device=device, max_sequences=max_sequences, num_slots=num_slots)
    if num_slots is not None or device != "cpu":
        return args
    num_slots = cpu_kv_slots(_model_config(args))
    return _resolved(settings, device=device, max_sequences=max_sequences, num_slots=num_slots)


def _resolved(
    settings: DrafterSettings, *, device: str, max_sequences: int, num_slots: int | None
) -> ServerArgs:
    server_args = ServerArgs(
        model_path=settings.model_path,
        revision=settings.revision,
        load_format=settings.load_format,
        quantization=settings.quantization,
        trust_remote_code=settings.trust_remote_code,
        device=device,
        dtype=settings.dtype,
        context_length=settings.context_length,
        mem_fraction_static=settings.mem_fraction,
        max_total_tokens=num_slots,
        max_running_requests=max_sequences,  # the most rows of one forward
        attention_backend=CPU_PLATFORM,
        page_size=1,
        disable_radix_cache=True,
        disable_cuda_graph=True,
    )
    server_args.resolve_once()
    return server_args
