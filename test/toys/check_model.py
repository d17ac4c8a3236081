"""Drives SGLang's draft model through every outcome beside Hugging Face's same weights.

A process of its own, because SGLang has one configuration per process:
`python -m toys.check_model MODEL_DIR` prints one JSON object of the largest differences
and of how often a forward planned its attention.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import numpy as np
import torch

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.model_step import BranchRows, ExtendRow, warm_up
from sglang_ssd.drafter.process import DrafterSettings
from toys.drafter_checks import (
    RecordingModel,
    largest_branch_difference_when_idle,
    largest_kv_difference,
)
from toys.outcomes import EVENTS, force
from toys.toy_target import ToyTarget

PROMPT = [11, 45, 230, 7, 301, 12, 99, 54, 120, 8, 16, 77]


class CheckedModel:
    """A ReferenceModel: SGLang's runner under test, Hugging Face's model as reference."""

    def __init__(self, path: str) -> None:
        os.environ["SGLANG_PLATFORM"] = "ssd_cpu"
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self._plans = count_plans()
        self.plans_per_forward: set[int] = set()
        from transformers import AutoModelForCausalLM

        from sglang_ssd.drafter.runner import SglangModelStep

        settings = DrafterSettings(
            model_path=path, dtype="float32", max_total_tokens=1500, context_length=256
        )
        self._step = SglangModelStep(settings, device="cpu", max_sequences=4)
        self._hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.vocab_size = self._step.vocab_size
        self.context_len = self._step.context_len
        self.total_slots = self._step.total_slots

    @property
    def num_layers(self) -> int:
        return int(self._step.kv_pool.layer_num)

    def extend(self, rows: Sequence[ExtendRow]) -> torch.Tensor:
        self._plans.clear()
        logits = self._step.extend(rows)
        self.plans_per_forward.add(len(self._plans))
        return logits

    def branch_step(self, rows: Sequence[BranchRows]) -> torch.Tensor:
        self._plans.clear()
        logits = self._step.branch_step(rows)
        self.plans_per_forward.add(len(self._plans))
        return logits

    @torch.inference_mode()
    def reference(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        output = self._hf(torch.tensor([list(tokens)]), use_cache=True)
        layers = output.past_key_values.layers
        kept = [torch.stack([one.keys[0], one.values[0]]).transpose(1, 2) for one in layers]
        return output.logits[0], torch.stack(kept)

    def kv(self, slots: Sequence[int]) -> torch.Tensor:
        pool = self._step.kv_pool
        at = torch.as_tensor(list(slots), dtype=torch.int64)
        layers = range(pool.layer_num)
        return torch.stack(
            [
                torch.stack([pool.get_key_buffer(i)[at], pool.get_value_buffer(i)[at]])
                for i in layers
            ]
        )


def count_plans() -> list[int]:
    """A list that grows by the number of rows whenever the attention backend makes a plan."""
    from sglang_ssd.platform import cpu_attention

    made: list[int] = []

    class CountedPlan(cpu_attention.AttentionPlan):
        def __init__(self, rows: list[cpu_attention.PlanRow]) -> None:
            made.append(len(rows))
            super().__init__(rows)

    cpu_attention.AttentionPlan = CountedPlan  # type: ignore[misc]
    return made


def row(token_ids: list[int], start: int, slots: Sequence[int]) -> ExtendRow:
    return ExtendRow(
        token_ids=np.array(token_ids), start=start, kv_slots=np.array(slots, dtype=np.int64)
    )


def check_extends(model: CheckedModel) -> float:
    """One row at once, in three slices, and beside rows of other lengths."""
    expected = model.reference(PROMPT)[0][-1]
    slots = list(range(500, 500 + len(PROMPT)))[::-1]
    found = [model.extend([row(PROMPT, 0, slots)])[0]]
    for start, end in ((0, 5), (5, 6), (6, len(PROMPT))):
        last = model.extend([row(PROMPT[start:end], start, slots[:end])])[0]
    found.append(last)
    others = [row(PROMPT[:3], 0, [700, 701, 702]), row(PROMPT[:1], 0, [710])]
    found.append(model.extend([others[0], row(PROMPT, 0, slots), others[1]])[1])
    return max(float((logits - expected).abs().max()) for logits in found)


def check_outcomes(model: CheckedModel, backup: str) -> dict[str, dict[str, float]]:
    """Per event: largest difference of the line's KV and of the new tree's logits."""
    found = {}
    for event in EVENTS:
        recording = RecordingModel(model)
        config = SsdConfig(fan_out=[2], backup=backup)
        target = ToyTarget(config=config, num_steps=4, draft_model=recording)
        request = target.open("r", PROMPT)
        target.run_until_idle()
        target.round()
        target.round()
        recording.branch_logits.clear()
        taken = force(target, request, event)
        difference, seen = largest_branch_difference_when_idle(target, recording)
        found[event.name] = {
            "as expected": float(taken.kind == event.kind and seen in (40, 41)),
            "kv": largest_kv_difference(target),
            "logits": difference,
            "accept length": float(request.accept_lens[-1]),
        }
    return found


def main() -> None:
    torch.set_num_threads(1)
    model = CheckedModel(sys.argv[1])
    warm_up(model)
    result = {
        "extend": check_extends(model),
        "outcomes": {backup: check_outcomes(model, backup) for backup in ("jit", "none")},
        "plans per forward": sorted(model.plans_per_forward),
        "layers": model.num_layers,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
