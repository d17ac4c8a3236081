"""The ways to start that other tests do not use: Engine, our launcher without the algorithm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import requests as http

from harness.client import Request, generate
from harness.prompts import load_prompts
from harness.reference import Reference
from harness.server import ServerPool

ENGINE_PROGRAM = """
import json, os, signal, sys, time
import sglang

if __name__ == "__main__":
    prompts, options = json.loads(sys.argv[1])
    engine = sglang.Engine(**options)
    answers = engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24}
    )
    state = engine.get_server_info()["internal_states"][0]["ssd"]
    os.kill(state["drafter_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    struck = state
    while "signal" not in struck["last_error"]:
        assert time.monotonic() < deadline, struck
        struck = engine.get_server_info()["internal_states"][0]["ssd"]
    again = engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24}
    )
    result = {"answers": answers, "ssd": state, "struck": struck, "again": again}
    print("RESULT" + json.dumps(result), flush=True)
    engine.shutdown()
"""


def test_engine(target: Path, reference: Reference, tmp_path: Path) -> None:
    """Red when the plugin relies on a server's command line, an Engine hangs at its end, also while
    its drafter is started again, or get_server_info() does not say how its drafter fares."""
    prompts = [prompt.input_ids for prompt in load_prompts(str(target), 4)]
    options = {
        "model_path": str(target),
        "device": "cpu",
        "dtype": "float32",
        "context_length": 2048,
        "max_total_tokens": 4096,
        "speculative_algorithm": "SSD",
        "speculative_num_steps": 3,
        "speculative_draft_model_path": str(target),
        "log_level": "info",
    }
    program = tmp_path / "program.py"
    program.write_text(ENGINE_PROGRAM)
    run = subprocess.run(
        [sys.executable, str(program), json.dumps([prompts, options])],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={
            **os.environ,
            "SGLANG_PLATFORM": "ssd_cpu",
            "SGLANG_SSD_CONFIG": json.dumps({"drafter_dtype": "float32"}),
        },
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    result = json.loads(line.removeprefix("RESULT"))
    expected = reference.answers([Request(ids, {"max_new_tokens": 24}) for ids in prompts])
    for answers in (result["answers"], result["again"]):
        assert [a["output_ids"] for a in answers] == [a.output_ids for a in expected]
    state, struck = result["ssd"], result["struck"]
    assert state["correct_drafts"] > 0
    assert (state["state"], state["live_sequences"], state["last_error"]) == ("ready", 0, "")
    assert struck["state"] == "restarting"
    assert f"process {state['drafter_pid']} ended with signal 9" in struck["last_error"]


def test_launcher_without_the_algorithm_is_a_plain_server(reference: Reference) -> None:
    """Red when our launcher speculates, or starts a drafter, without being asked to."""
    server = reference.server
    assert server.spec.entry == "launcher"
    assert server.drafter_processes() == []
    info: Any = http.get(f"{server.url}/server_info", timeout=30).json()
    assert info["speculative_algorithm"] is None
    assert "ssd" not in info["internal_states"][0]
    assert generate(server.url, Request("Hello", {"max_new_tokens": 4})).num_correct_drafts == 0


def test_a_server_without_a_tokenizer(
    pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when drafts need the target's tokenizer, or a server without one does not say that it
    compares vocabularies by their sizes alone."""
    server = pool.get(spec_for("self", flags=("--skip-tokenizer-init",)))
    params = {"max_new_tokens": 24, "ignore_eos": True}
    cases = [Request(p.input_ids, params) for p in load_prompts(server.spec.model, 4)]
    for case, want in zip(cases, reference.answers(cases), strict=True):
        reply = http.post(f"{server.url}/generate", json=case.body(), timeout=600)
        assert reply.status_code == 200, reply.text
        assert reply.json()["output_ids"] == want.output_ids
    assert server.ssd()["correct_drafts"] > 0
    assert server.log_text().count("token-to-id maps are not compared, the target has no") == 1
