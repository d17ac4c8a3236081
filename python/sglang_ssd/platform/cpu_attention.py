"""SGLang attention backend "ssd_cpu": plain MHA/GQA, of torch operations alone.

On CPU it serves target and drafter alike; a drafter runs on it on every device, since no other
backend takes its plans.

The plan of a forward is made once, in init_forward_metadata, from the request rows; a layer writes
its K and V and runs the plan. A spec_info whose `attention_plan` is a tuple of PlanRow is used as
it is: that is how the drafter states its tree masks. `plugin.register` makes the name known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor, nn

from sglang_ssd.config import CPU_PLATFORM
from sglang_ssd.platform.attention_plan import AttentionPlan, PlanRow, causal_rows

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuAttentionBackend(AttentionBackend):
    """Owns the plan of the forward in flight."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        reasons = unsupported_attention(model_runner.model)
        if model_runner.use_mla_backend:
            reasons.append("MLA (latent attention)")
        if reasons:
            raise ValueError(
                f"--attention-backend {CPU_PLATFORM} serves plain MHA/GQA only; "
                f"{type(model_runner.model).__name__} needs: {', '.join(reasons)}"
            )
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.plan = AttentionPlan([])

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.plan = AttentionPlan(self._plan_rows(forward_batch))

    def _plan_rows(self, forward_batch: ForwardBatch) -> list[PlanRow]:
        spec_info = forward_batch.spec_info
        # Any algorithm's SpecInput can arrive here; only ours has the attribute.
        own_rows: tuple[PlanRow, ...] | None = getattr(spec_info, "attention_plan", None)
        if own_rows is not None:
            return list(own_rows)
        if forward_batch.forward_mode.is_idle():
            return []
        widths = _query_widths(forward_batch)
        kv_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_target_verify():
            kv_lens = [kv_len + width for kv_len, width in zip(kv_lens, widths, strict=True)]
        req_to_token = self.req_to_token_pool.req_to_token
        kv_slots = [
            req_to_token[row, :kv_len].long()
            for row, kv_len in zip(forward_batch.req_pool_indices.tolist(), kv_lens, strict=True)
        ]
        return causal_rows(kv_slots, widths)

    def forward_extend(
        self,
        q: Tensor,  # [tokens, heads * D]
        k: Tensor | None,  # [tokens, kv_heads, D]
        v: Tensor | None,  # [tokens, kv_heads, D]
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: object,
    ) -> Tensor:  # [tokens, heads * D]
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = self.plan.attend(
            query,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            layer.scaling,
        )
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False


def _query_widths(forward_batch: ForwardBatch) -> list[int]:
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return [1] * forward_batch.batch_size
    if mode.is_target_verify():
        # The verify width may differ from round to round: 1..K+1.
        width = forward_batch.input_ids.numel() // forward_batch.batch_size
        return [width] * forward_batch.batch_size
    return forward_batch.extend_seq_lens.tolist()


def unsupported_attention(model: nn.Module) -> list[str]:
    """What this model's attention layers ask for that the backend does not do, by name."""
    reasons: set[str] = set()
    for layer in model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        checks = {
            "sliding window attention": layer.sliding_window_size > -1,
            "cross attention": layer.is_cross_attention,
            "bidirectional attention": layer.attn_type != AttentionType.DECODER,
            "logit soft capping": layer.logit_cap > 0,
            "different head sizes for queries and values": layer.qk_head_dim != layer.v_head_dim,
            "attention temperature": layer.xai_temperature_len > 0,
        }
        reasons.update(name for name, needed in checks.items() if needed)
    return sorted(reasons)
