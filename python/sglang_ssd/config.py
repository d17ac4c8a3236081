"""The settings that SGLang has no flag for: one strict, typed config that reaches every process.

It travels in the environment variable SGLANG_SSD_CONFIG (a JSON object or the path of one), which every
process of an SGLang server inherits. `launch_server` builds it from --ssd-* flags.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

CONFIG_ENV = "SGLANG_SSD_CONFIG"
"""Environment variable that carries the config: JSON text, or the path of a JSON file."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(gt=0)]


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields in the order of --help; each has a --ssd-* flag of the same name."""

    mode: Literal["async", "sync", "off"] = "async"
    """async: SSD. sync: ordinary speculative decoding with the same drafter. off: plain decode, no drafter."""
    backup: Literal["jit", "none"] = "jit"
    """What serves a missed row: jit drafts it while the batch waits, none decodes it plainly this round."""

    fan_out: list[int] = [3]
    """Bonus guesses per accept position: one number for all K+1 positions, or K+1 numbers."""
    fan_out_policy: Literal["uniform", "geometric"] = "uniform"
    """uniform: fan_out as given. geometric: Theorem 12 over the same number of branches."""
    acceptance_rate: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.8
    power_law_exponent: Positive = 1.0

    endpoint: str | None = None
    """None: start a drafter on a fresh ipc:// endpoint. Otherwise connect to the drafter that listens there."""
    reply_deadline_ms: Positive = 500.0
    start_timeout_s: Positive = 180.0
    lease_s: Positive = 10.0

    drafter_device: str = "auto"
    drafter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    drafter_max_total_tokens: PositiveInt | None = None
    drafter_max_sequences: PositiveInt | None = None
    drafter_mem_fraction: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.8
    drafter_context_length: PositiveInt | None = None
    prefill_slice_tokens: PositiveInt = 256

    target_cores: str = "auto"
    drafter_cores: str = "auto"

    allow_padded_vocab: bool = False
    trace: str | None = None
