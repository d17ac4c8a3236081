"""SGLang's own models as drafters: KV and logits after every outcome, for every supported class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from harness.checkpoints import find_model

ROUNDING = 2e-3
"""fp32 logits and keys of SGLang and Hugging Face differ by up to about 1e-4."""

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
QWEN = "qwen2.5-coder-0.5b"
LARGE_LIMIT_S = 3600
CLASSES: dict[str, Callable[..., Any]] = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
}


def largest_differences(model_dir: Path, *, limit_s: float = 500) -> dict[str, Any]:
    test_dir = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "toys.check_model", str(model_dir)],
        cwd=test_dir,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def assert_right(found: dict[str, Any]) -> None:
    assert found["extend"] < ROUNDING
    assert found["layers"] > 1
    assert found["plans per forward"] == [1], "one for all layers"
    for backup, events in found["outcomes"].items():
        for name, figures in events.items():
            assert figures["as expected"] == 1, f"{backup}: {name}"
            assert figures["kv"] < ROUNDING, f"{backup}: {name}"
            assert figures["logits"] < ROUNDING, f"{backup}: {name}"
            assert figures["accept length"] == 5, "the same weights are always right"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if index else [])
        for index, name in enumerate(CLASSES)
    ],
)
def test_every_supported_class_with_small_random_weights(name: str, tmp_path: Path) -> None:
    transformers.set_seed(0)
    config = CLASSES[name](**SMALL)
    model = getattr(transformers, name)(config)
    model.save_pretrained(tmp_path)
    assert_right(largest_differences(tmp_path))


@pytest.mark.slow
def test_the_demo_model(target: Path) -> None:
    assert_right(largest_differences(target))


@pytest.mark.slow
@pytest.mark.timeout(LARGE_LIMIT_S + 60)
def test_real_qwen2_weights() -> None:
    """Red when what random weights lack goes wrong: biased keys, a large vocabulary."""
    model = find_model(QWEN)
    if model is None:
        pytest.skip(f"no checkpoint {QWEN} in the folder that SGLANG_SSD_MODELS names")
    assert_right(largest_differences(model, limit_s=LARGE_LIMIT_S))
