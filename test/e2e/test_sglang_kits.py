"""SGLang's own tests of a running server, as its wheel brings them, against a server with SSD.

`sglang.test.kits` holds the tests that SGLang's continuous integration mixes into its own classes,
those of its speculative algorithms among them. Here they run against our server, unchanged.

What does not run and why: SpecAccuracyKit, SpecPerfKit and every other kit that measures accuracy
or speed (they fetch datasets and expect a GPU); SpecSamplingMaskKit (return_sampling_mask is
refused, docs/sampling.md); the timeout kits (they need a server that times requests out); the kits
of vision, PD disaggregation, HiCache and DSA; the tests in LEFT_OUT.
"""

from __future__ import annotations

import subprocess
import unittest
from typing import Any

import openai
import pytest
import requests
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
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

from harness.server import Server, ServerPool, ServerSpec

KITS = (
    *(SpecCorrectnessKit, SpecLogprobKit, SpecPenaltyKit, SpecFeatureKit, SpecHiddenStatesKit),
    *(SpecGrammarKit, JSONConstrainedMixin, JSONModeMixin, RegexConstrainedMixin),
    *(EBNFConstrainedMixin, MatchedStopMixin, BasicAPIContractMixin, BasicDecodeCorrectnessMixin),
    *(BasicSchedulerStressMixin, AbortAllMixin, PauseResumeInPlaceMixin, AnthropicMessagesMixin),
    StreamingSessionKitMixin,
)
LEFT_OUT = {
    "test_radix_attention": "400 prompts of thousands of tokens: hours on a CPU",
}
"""Tests that ask for what there is not here."""

FLAGS = (
    "--enable-return-hidden-states",
    "--enable-streaming-session",
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


@pytest.mark.parametrize(("kit", "name"), cases())
def test_sglangs_own(kit: type, name: str, server: Server) -> None:
    """Red when a client of SGLang would see another server."""
    fields = {
        "base_url": server.url,
        "model": server.spec.model,
        "process": server.process,
        "_tokenizer": None,
        **SMALLER,
    }
    host = type(kit.__name__, (kit, Host), fields)(name)
    host.debug()


def test_left_out_tests_exist() -> None:
    """Red when a kit drops or renames a test that is left out here."""
    names = {name for kit in KITS for name in dir(kit)}
    assert set(LEFT_OUT) <= names
