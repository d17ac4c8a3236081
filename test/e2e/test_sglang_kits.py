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
- The tests in LEFT_OUT.

Those in WITH_OVERLAP run with overlap scheduling as well: what they ask is decided where the
scheduler takes up a round's result, which is a step late then. With overlap, and where requests
time out, SGLang counts its slots after every step, as it does where it runs these kits itself. The
others ask what a parser, a grammar's compiler or the HTTP server does, whichever schedule is below.

SGLang's repository has the files that use them, in test/registered/spec. Read, and what becomes of
them here:

- `eagle/test_spec_eagle.py`, `_extra`, `_draft_prefetch`: SpecCorrectnessKit, SpecLogprobKit,
  SpecPenaltyKit, SpecFeatureKit, SpecGrammarKit and MatchedStopMixin with and without overlap,
  below. `_parity`: SpecParityKit, see above.
- `_stress`: AbortAllMixin and both kits of timeouts, below; under retraction, test_limits.py. Its
  throughput is a GPU's.
- `_topk`, `_topk_page`, `_page`, `_triton`, `_fa3`, `_intel_xpu`: the same kits over trees of
  drafts, larger pages (refused, docs/support.md) and a GPU's attention. Prefill in chunks of few
  tokens: field_cases/test_fr33_chunked_prefill.py.
- `eagle/test_eagle_infer_a.py`, `_b`, `_beta`: the kits' forerunners (abort, radix cache, logprobs,
  penalties, JSON, timeouts), an accept length that a 7B model reaches, and a dataset.
- `eagle/test_eagle_constrained_decoding.py`, `test_multi_layer_eagle_constrained_decoding.py`:
  JSONConstrainedMixin and RegexConstrainedMixin, below.
- `eagle/test_eagle_hidden_states.py`, `test_eagle_v2_hidden_states.py`,
  `test_eagle3_hidden_states.py`: SpecHiddenStatesKit below; row by row, test_hidden_states.py.
- `eagle/test_eagle_cache_hit_nan.py`: the cache-hit kit, below.
- `eagle/test_eagle_logprob_correctness.py`: a kit that the wheel lacks. It compares logprobs of a
  decode with those of a prefill, as SpecLogprobKit does below. `test_spec_v2.py`: the same by a
  divergence over a dataset.
- `eagle/test_eagle_reject_sampling.py`: a dataset under rejection sampling, in whose place we draw
  with shared noise; test_sampling_law.py.
- `eagle/test_eagle3_basic.py`, `test_eagle_swa_target.py`: a dataset that a model of billions of
  parameters answers; the second's has sliding windows too.
- `eagle/test_adaptive_speculative.py`, `_topk`, `test_spec_token_map_tp.py`: flags that change K
  while a server runs, and that name a part of the vocabulary for EAGLE's head. Both are refused as
  not used by SSD; our K adapts to nothing, our drafters have heads of their own.
- `eagle/test_eagle_dp_attention.py`: attention data parallelism, which is refused.
- `eagle/test_mtp_model_update_weights_by_cuda_ipc.py`: whether a GPU's memory is opened twice for a
  draft model in the target's process; ours is in none. Weight updates: test_operator.py.
- `eagle/test_eagle_sampling_filters.py`, `test_rocm_eagle_renorm.py`, and in `utils/`
  `test_build_eagle_tree_malformed.py`, `test_tree_speculative_sampling.py`, `test_ngram_cache.py`:
  functions of other algorithms, most on a GPU. A chain needs no tree; how it is verified is in
  test_verify.py.
- `dflash/test_dflash.py`, `test_dflash_infer_b.py`: MatchedStopMixin, JSONConstrainedMixin,
  SpecGrammarKit and SpecLogprobKit, below; answers of one to three tokens, no special token in a
  text, and the same answer twice, which field_cases/test_fr09_stops.py and every comparison with a
  reference have. It asks for a sampling mask, which is refused (docs/sampling.md).
- `dflash/test_dflash_verify_budget.py`: drawn and constrained requests of one batch under a budget
  of drafts that is DFlash's; the mix is in field_cases/test_fr08_mixed_temperatures.py and FR-14.
- `dflash/test_dflash_draft_swa_pool.py`, `_tree`, `_sampling_filters`: a pool for its draft's
  sliding windows, trees, and a function on a GPU.
- `dspark/test_dspark.py`: as `test_dflash.py`, for another model. `test_dspark_logprobs.py`,
  `_disaggregation`, `_result_buffer_reuse`, `_simulated_bonus`: classes of DSpark's own, without a
  server. Of logprobs of a verify's rows, FR-18 says the same of ours. `_capture_derived_sps_tp2`:
  a table of costs that several GPUs agree on.
- `test_constrained_decoding_spec_reasoning.py`: a schema behind a thought, of a model of 120B
  parameters; test_sampling_table.py compares both.
- `test_standalone_speculative_decoding.py`, `test_ngram_speculative_decoding.py`: a dataset, and
  attention backends of a GPU.

Known by name alone: in `eagle/` the files of DeepSeek and of other mixes with dp-attention, in
`dflash/` those of further models (Domino, MiMo, Qwen3.5, Muse), in `dspark/` the classes of its
scheduler, its costs, its confidence, its kernels and its ragged verify. Each asks for another
algorithm's model, for a GPU, or for a class of an algorithm that is none of ours.
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
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
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
from harness.prompts import FILE, STORY, encode
from harness.rounds import RoundCounter, assert_drafting
from harness.server import OVERLAP, Server, ServerPool, ServerSpec

pytestmark = pytest.mark.timeout(3600)
"""A test may start two servers, and the kits' own tests take minutes on two cores."""

KITS = (
    *(SpecCorrectnessKit, SpecLogprobKit, SpecPenaltyKit, SpecFeatureKit, SpecHiddenStatesKit),
    *(SpecGrammarKit, JSONConstrainedMixin, JSONModeMixin, RegexConstrainedMixin),
    *(EBNFConstrainedMixin, MatchedStopMixin, BasicAPIContractMixin, BasicDecodeCorrectnessMixin),
    *(BasicSchedulerStressMixin, AbortAllMixin, PauseResumeInPlaceMixin, AnthropicMessagesMixin),
    StreamingSessionKitMixin,
)
WITH_OVERLAP = (
    *(SpecCorrectnessKit, SpecLogprobKit, SpecPenaltyKit, SpecFeatureKit, SpecHiddenStatesKit),
    *(SpecGrammarKit, MatchedStopMixin, AbortAllMixin, PauseResumeInPlaceMixin),
)
STRICT = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
TIMEOUTS: dict[type, tuple[tuple[str, ...], tuple[str, str]]] = {
    WaitingTimeoutMixin: (("--max-running-requests", "1"), ("SGLANG_REQ_WAITING_TIMEOUT", "1")),
    RunningTimeoutTwoWaveMixin: ((), ("SGLANG_REQ_RUNNING_TIMEOUT", "6")),
}
"""Flags and variable of a kit's server, whose first request of all must not time out either."""
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


def cases(kits: tuple[type, ...] = KITS) -> list[Any]:
    return [
        pytest.param(kit, name, id=f"{kit.__name__}-{name}")
        for kit in kits
        for name in unittest.TestLoader().getTestCaseNames(kit)  # type: ignore[arg-type]
        if name not in LEFT_OUT
    ]


@pytest.fixture
def server(pool: ServerPool, spec_for: Any) -> Server:
    spec: ServerSpec = spec_for("self", flags=FLAGS)
    return pool.get(spec)


@pytest.fixture
def overlapped_server(pool: ServerPool, spec_for: Any) -> Server:
    spec: ServerSpec = spec_for("self", flags=FLAGS, settings=OVERLAP, env=(STRICT,))
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


@pytest.mark.parametrize(("kit", "name"), cases(WITH_OVERLAP))
def test_sglangs_own_with_overlap(kit: type, name: str, overlapped_server: Server) -> None:
    """Red when the schedule decides what a client of speculation sees, or a slot is lost while
    other requests run."""
    run_kit(kit, name, overlapped_server)
    assert_drained(overlapped_server)


@pytest.mark.parametrize("kit", TIMEOUTS)
def test_sglangs_own_timeouts(kit: type, pool: ServerPool, spec_for: Any) -> None:
    """Red when a request that times out, waiting or between two rounds, takes others with it or
    leaves its sequence with the drafter."""
    server = server_with_timeout(kit, pool, spec_for)
    (name,) = unittest.TestLoader().getTestCaseNames(kit)  # type: ignore[arg-type]
    run_kit(kit, name, server)
    assert_drained(server)


def test_a_request_runs_no_longer_than_it_may(pool: ServerPool, spec_for: Any) -> None:
    """Red when no request of the kit above times out, which it does not look for, or those that do
    have had no drafts."""
    server = server_with_timeout(RunningTimeoutTwoWaveMixin, pool, spec_for)
    counter = RoundCounter(server)
    params = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    body = {"text": STORY, "sampling_params": params}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=120)
    assert answer.status_code == 503, answer.text
    assert answer.json()["message"] == "Request running timeout reached."
    assert_drafting("self", counter.since())
    assert_drained(server)


def server_with_timeout(kit: type, pool: ServerPool, spec_for: Any) -> Server:
    flags, variable = TIMEOUTS[kit]
    spec: ServerSpec = spec_for("self", flags=flags, env=(variable, STRICT))
    return pool.get(spec)


def test_left_out_tests_exist() -> None:
    """Red when a kit drops or renames a test that is left out here, or that the model fails."""
    names = {name for kit in KITS for name in dir(kit)}
    assert set(LEFT_OUT) <= names
    assert {case.id for case in cases()} >= THE_MODEL_FAILS
