"""SGLang's own tests of a running server, as its wheel brings them, against a server with SSD.

`sglang.test.kits` holds the tests that SGLang's continuous integration mixes into its own classes,
those of its speculative algorithms among them. Here they run against our server, unchanged. Some
ask what only a larger model knows: those are named in THE_MODEL_FAILS, and the server without
speculation must fail at the same check. The kits that do not run here, and why:

- `eval_accuracy_kit`, `lm_eval_kit`, `kl_divergence_kit`, `SpecAccuracyKit`: fetch datasets.
- `perf_bench_kit`, `spec_decoding_kit`, `fwd_occupancy_kit`, `SpecPerfKit`: a GPU's speed.
- `mmmu_vlm_kit`, `vlm_perf_kit`: a model that sees.
- `dsa_metadata_kit`, `attention_unittest`: a GPU's attention backends, without a server.
- `unified_radix_cache`, `unified_radix_cache_kit`: the cache's own data structures, and a dataset.
- `pd_parity_kit`: prefill and decode apart, which is refused (docs/support.md).
- `reasoning_kit`: a model that reasons; test_operator.py compares the split of reasoning.
- `prefix_cache_branching_kit`: expects of a Mamba cache that the second of two branches misses.
- `SpecParityKit`: starts servers of its own; every other file here compares with a plain server.
- `SpecSamplingMaskKit`: return_sampling_mask is refused (docs/sampling.md).
- `AbortLeakReproKitMixin`: a context of 512 tokens in pages of 256, which are refused.
- `WaitingTimeoutMixin`, `RunningTimeoutTwoWaveMixin`: servers whose requests time out.
- The tests in LEFT_OUT.

SGLang's repository has the files that use them, in test/registered/spec. Read, and what becomes of
them here:

- `eagle/test_spec_eagle.py`, `_extra`: SpecCorrectnessKit, SpecLogprobKit, SpecPenaltyKit,
  SpecFeatureKit and MatchedStopMixin with and without overlap. They run below; without overlap
  test_configurations.py. `test_spec_eagle_parity.py`: SpecParityKit, see above.
- `eagle/test_eagle_infer_a.py`, `_b`: the kits' forerunners (abort, radix cache, logprobs,
  penalties, JSON, timeouts), an accept length that a 7B model reaches, and a dataset. With
  retraction: test_limits.py.
- `eagle/test_eagle_constrained_decoding.py`: JSONConstrainedMixin and RegexConstrainedMixin, below.
- `eagle/test_eagle_cache_hit_nan.py`: the cache-hit kit, below.
- `eagle/test_eagle_logprob_correctness.py`: a kit that the wheel lacks. It compares logprobs of a
  decode with those of a prefill, as SpecLogprobKit does below.
- `eagle/test_eagle_sampling_filters.py`: a function of EAGLE's on a GPU.
- `eagle/test_eagle_reject_sampling.py`: a dataset under rejection sampling, in whose place we draw
  with shared noise; test_sampling_law.py.
- `test_standalone_speculative_decoding.py`, `test_ngram_speculative_decoding.py`: a dataset, and
  attention backends of a GPU.

Known by name alone, because each asks for another algorithm's model, a GPU or several of them:
`dflash/`, `dspark/`, `utils/` (EAGLE's trees, the n-gram cache), and in `eagle/` the files of
adaptive steps, dp-attention (refused, docs/support.md), DeepSeek, ROCm, XPU, pages, FlashAttention
3, weights over CUDA IPC, and hidden states of EAGLE's own drafts.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
import traceback
import unittest
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecHiddenStatesKit,
    SpecLogprobKit,
    SpecPenaltyKit,
)
from sglang.test.kits.streaming_session_kit import StreamingSessionKitMixin
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

from harness.idle import assert_drained
from harness.prompts import FILE, encode
from harness.server import Server, ServerPool, ServerSpec

pytestmark = pytest.mark.timeout(3600)
"""A test may start two servers, and the kits' own tests take minutes on two cores."""

KITS = (
    *(SpecCorrectnessKit, SpecLogprobKit, SpecPenaltyKit, SpecFeatureKit, SpecHiddenStatesKit),
    *(SpecGrammarKit, JSONConstrainedMixin, JSONModeMixin, RegexConstrainedMixin),
    *(EBNFConstrainedMixin, MatchedStopMixin, BasicAPIContractMixin, BasicDecodeCorrectnessMixin),
    *(BasicSchedulerStressMixin, AbortAllMixin, PauseResumeInPlaceMixin, AnthropicMessagesMixin),
    StreamingSessionKitMixin,
)
LEFT_OUT = {
    "test_long_prompt": "a prompt of 8000 tokens, which neither context nor cores here are made "
    "for; prompts in several chunks are in field_cases/test_fr33_chunked_prefill.py",
}
"""Tests that ask for what there is not here."""
THE_MODEL_FAILS = frozenset(
    {
        "BasicDecodeCorrectnessMixin-test_basic_math",
        "BasicDecodeCorrectnessMixin-test_color_completion",
        "BasicSchedulerStressMixin-test_concurrent_requests",  # capitals, in one word
    }
)
"""Tests that ask for what a model of 135M parameters does not know."""

FLAGS = (
    "--enable-return-hidden-states",
    "--enable-streaming-session",
    "--allow-auto-truncate",  # the kits ask for up to 100000 tokens
    *("--chunked-prefill-size", "1024"),
)
SMALLER = {
    "abort_all_num_requests": 12,
    "abort_all_max_new_tokens": 1500,
    "pause_num_requests": 6,
    "pause_max_new_tokens": 64,
    "pause_ignore_eos": True,
}
"""The kits' own knobs, for two cores."""


class Host(SpecEagleServerBase):  # type: ignore[misc]
    """What the kits expect of the class that they are mixed into."""

    api_key = "EMPTY"
    process: subprocess.Popen[bytes]

    def send_request(self) -> None:
        """The fixture's own asks for a thousand tokens of each prompt."""
        for prompt in ("The capital of France is", "Once upon a time"):
            params = {"temperature": 0, "max_new_tokens": 64}
            body = {"text": prompt, "sampling_params": params}
            assert requests.post(f"{self.base_url}/generate", json=body).status_code == 200

    @property
    def client(self) -> openai.Client:
        return openai.Client(api_key="EMPTY", base_url=f"{self.base_url}/v1")


def cases() -> list[Any]:
    return [
        pytest.param(kit, name, id=f"{kit.__name__}-{name}")
        for kit in KITS
        for name in unittest.TestLoader().getTestCaseNames(kit)  # type: ignore[arg-type]
        if name not in LEFT_OUT
    ]


@pytest.fixture(scope="module")
def server(pool: ServerPool, spec_for: Any) -> Server:
    spec: ServerSpec = spec_for("self", flags=FLAGS)
    return pool.get(spec)


@pytest.fixture
def plain_server(target: Path, reference_pool: ServerPool) -> Any:
    """Starts the server without speculation when it is first asked for."""
    spec = ServerSpec(model=str(target), flags=(*FLAGS, "--disable-overlap-schedule"))
    return functools.partial(reference_pool.get, spec)


@pytest.fixture(autouse=True)
def small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The radix kit draws 400 prompts of thousands of tokens, which would take hours."""
    random.seed(7)
    draw = functools.partial(radix_cache_server_kit.gen_radix_tree, num_nodes=40, chunk_len=24)
    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", draw)


def run_kit(kit: type, name: str, server: Server) -> None:
    fields = {
        "base_url": server.url,
        "model": server.spec.model,
        "process": server.process,
        "_tokenizer": None,
        **SMALLER,
    }
    type(kit.__name__, (kit, Host), fields)(name).debug()


def failed_check(error: AssertionError) -> tuple[str, int | None]:
    """File and line of the kit whose assertion failed."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [one for one in frames if "/sglang/test/" in one.filename][-1]
    return frame.filename, frame.lineno


@pytest.mark.parametrize(("kit", "name"), cases())
def test_sglangs_own(kit: type, name: str, server: Server, plain_server: Any) -> None:
    """Red when a client of SGLang would see another server."""
    try:
        run_kit(kit, name, server)
    except AssertionError as ours:
        try:
            run_kit(kit, name, plain_server())
        except AssertionError as plain:
            if failed_check(plain) == failed_check(ours):
                assert_known(kit, name, plain)
                pytest.xfail(f"the server without speculation fails alike: {plain}")
        raise
    assert_drained(server)


def assert_known(kit: type, name: str, plain: AssertionError) -> None:
    """Both servers failing at one check is not enough: it might be for reasons of their own."""
    known = f"{kit.__name__}-{name}" in THE_MODEL_FAILS
    assert known, f"not in THE_MODEL_FAILS, but the plain server fails at the same check: {plain}"


def test_cached_tokens_of_turns(server: Server, tmp_path: Path) -> None:
    """Red when a turn does not find the whole turn before it in the prefix cache.

    It is SGLang's cache-hit kit, with our prompts in the form of its dataset.
    """
    texts = [
        line["text"] for line in map(json.loads, FILE.read_text().splitlines()) if "text" in line
    ]
    long_enough = [text for text in texts if len(encode(server.spec.model, text)) > 1]
    turns = [{"conversations": [{"value": one}, {"value": one}]} for one in long_enough]
    dataset = tmp_path / "turns.json"
    dataset.write_text(json.dumps(turns))
    found = run_multiturn_cache_hit_test(
        server.url,
        server.spec.model,
        num_clients=4,
        num_rounds=3,
        request_length=64,
        output_length=16,
        dataset_path=str(dataset),
    )
    assert found["overall"]["total_cached_tokens"] > 0
    assert_drained(server)


def test_left_out_tests_exist() -> None:
    """Red when a kit drops or renames a test that is left out here, or that the model fails."""
    names = {name for kit in KITS for name in dir(kit)}
    assert set(LEFT_OUT) <= names
    assert {case.id for case in cases()} >= THE_MODEL_FAILS
