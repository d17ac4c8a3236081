"""What the CPU platform puts in the place of SGLang's Triton code, on tensors one can draw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.runtime_context import get_context

from sglang_ssd import plugin
from sglang_ssd.config import ALGORITHM, MAX_NUM_STEPS
from sglang_ssd.platform import cpu
from sglang_ssd.platform.cpu_attention import CpuAttentionBackend, unsupported_attention
from sglang_ssd.target.algorithm import widen_request_rows


def test_new_slots_go_to_the_columns_they_were_reserved_for() -> None:
    """Red when a row without new slots, or an uneven reserve, shifts its neighbours."""
    table = torch.zeros(4, 6, dtype=torch.int32)
    cpu.assign_req_to_token(
        torch.tensor([2, 0, 3]),
        table,
        torch.tensor([1, 4, 0]),
        torch.tensor([3, 4, 3]),
        torch.tensor([11, 12, 13, 14, 15]),
        3,
    )
    assert table.tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 11, 12, 0, 0, 0],
        [13, 14, 15, 0, 0, 0],
    ]


def test_a_reserve_past_the_row_is_an_error() -> None:
    """Red when slots spill into the next request's row, as they do in the Triton kernel."""
    table = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(IndexError):
        cpu.assign_req_to_token(
            torch.tensor([0]), table, torch.tensor([2]), torch.tensor([4]), torch.tensor([7, 8]), 1
        )


def test_verify_slots_are_read_row_by_row() -> None:
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    slots = cpu.extend_cache_locs(
        req_pool_indices=torch.tensor([1, 0]),
        req_to_token=table,
        start_offset=torch.tensor([3, 0]),
        end_offset=torch.tensor([5, 2]),
        batch_size=2,
        draft_token_num=2,
        device="cpu",
    )
    assert slots.tolist() == [9, 10, 0, 1]
    assert slots.dtype == torch.int64


def test_platform_is_silent_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an installed plugin would take over a machine with a GPU."""
    monkeypatch.setenv("SGLANG_PLATFORM", "")
    assert plugin.activate_cpu_platform() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "ssd_cpu")
    assert plugin.activate_cpu_platform() == "sglang_ssd.platform.cpu.SsdCpuPlatform"


def served_by(algorithm: str, num_steps: int) -> Any:
    """SGLang's settings in this process, for as long as they are entered."""
    return get_context().override_server_args(
        page_size=1,
        speculative_algorithm=algorithm,
        speculative_num_steps=num_steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=num_steps + 1,
    )


@pytest.mark.parametrize("num_steps", range(1, MAX_NUM_STEPS + 1))
def test_rows_hold_what_a_decode_reserves(num_steps: int) -> None:
    """Red when the last rounds before the context's end reserve more than a row has, or SGLang
    reserves less than two rounds: under overlap one begins before the last is counted."""
    context = 128
    plugin.register()
    with served_by(ALGORITHM, num_steps):
        reserve = allocation_sizing.get_alloc_reserve_per_decode()
        # No request that decodes has more than the whole context.
        kv = SimpleNamespace(kv_committed_len=context, kv_allocated_len=context)
        _, (end,), _ = allocation_sizing.page_aligned_decode_alloc_lens(
            [SimpleNamespace(kv=kv)], reserve=reserve, page_size=1
        )
        columns = widen_request_rows(allocation_sizing.get_req_to_token_extra_context_len())
    assert reserve >= 2 * (num_steps + 1)
    assert end <= context + columns
    assert columns == max(num_steps + 5, 2 * (num_steps + 1))
    with served_by("EAGLE", num_steps):
        assert widen_request_rows(num_steps + 5) == num_steps + 5


@pytest.mark.parametrize(
    ("changes", "use_mla", "needs"),
    [
        ({}, True, "MLA (latent attention)"),
        ({"sliding_window_size": 8}, False, "sliding window attention"),
        ({"is_cross_attention": True}, False, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, False, "bidirectional attention"),
        ({"logit_cap": 30.0}, False, "logit soft capping"),
        ({"v_head_dim": 2}, False, "different head sizes for queries and values"),
        ({"xai_temperature_len": 9}, False, "attention temperature"),
        (
            {"logit_cap": 30.0, "is_cross_attention": True},
            True,
            "cross attention, logit soft capping, MLA (latent attention)",
        ),
    ],
)
def test_an_attention_of_another_kind_is_refused(
    changes: dict[str, Any], use_mla: bool, needs: str
) -> None:
    """Red when a model is served as if its heads were plain, or refused for another cause."""
    layer = RadixAttention(1, 4, 0.5, 1, 0)
    assert unsupported_attention(layer) == []
    for name, value in changes.items():
        assert hasattr(layer, name)
        setattr(layer, name, value)
    runner = SimpleNamespace(model=torch.nn.Sequential(layer), use_mla_backend=use_mla)
    with pytest.raises(ValueError, match="plain MHA/GQA") as refused:
        CpuAttentionBackend(runner)  # type: ignore[arg-type]
    assert str(refused.value) == (
        f"--attention-backend ssd_cpu serves plain MHA/GQA only; Sequential needs: {needs}"
    )
