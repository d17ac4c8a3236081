r"""Host time of a round beside the target's forward, and what exact answers add to it.

    python benchmark/bench_host.py --batch-size 4 --vocab-size 151936

One worker serves rounds of greedy requests whose drafts are all right; the target's forward is
replaced by ready logits and the wire by ready replies, so what is timed is everything else: drafts
in, verify input, choice, acceptance, outcome out, and where each request ends, which SGLang's
scheduler looks for after every round; in CPU time of the one thread that does it. The arms take
turns round by round on the same worker and batch, in random order:

without    no transforms of rows, and SGLang's own look for the end: what a round would be if it
           knew no penalties, and not where plain decode ends
plain      the round as it is, nobody is penalised
penalised  one request of the batch has three penalties and an output of --output-len tokens
reported   plain, with the times and the log line that every server has
exported   the same with metrics

The last two are compared with plain, the others with without. Fails if the arm "plain" takes more
than --most-added longer than "without".
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from report import add_out_flag, finish, print_table, warn_if_busy

BASES = {
    **{"without": "without", "plain": "without", "penalised": "without"},
    **{"reported": "plain", "exported": "plain"},
}
"""What each arm is compared with."""
ARMS = tuple(BASES)
WARM_UP = 20


class ReadyReplies:
    """A wire whose drafter has always drafted `drafts`."""

    def __init__(self, drafts: Sequence[Sequence[int]]) -> None:
        from sglang_ssd.wire.transport import TransportStats

        self.stats = TransportStats()
        self._drafts = drafts
        self._replies: list[tuple[Any, list[int]]] = []

    def send(self, message: Any, frames: Sequence[Sequence[int]] = ()) -> bool:
        from sglang_ssd.wire.messages import Hello, SpeculateReply, VerifyCommit, Welcome

        if isinstance(message, Hello):
            welcome = Welcome(
                schema_version=message.schema_version,
                drafter_pid=os.getpid(),
                vocab_size=message.vocab_size,
                context_len=1 << 20,
            )
            self._replies.append((welcome, []))
        if isinstance(message, VerifyCommit):
            ends = zip(message.base_committed_lens, message.num_tokens, strict=True)
            reply = SpeculateReply(
                round_id=message.round_id,
                rids=message.rids,
                generations=message.generations,
                base_committed_lens=[base + num for base, num in ends],
                num_drafts=[len(one) for one in self._drafts],
                served=["hit"] * len(self._drafts),
                bonus_ranks=[0] * len(self._drafts),
            )
            self._replies.append((reply, [token for one in self._drafts for token in one]))
        return True

    def receive(self, timeout_s: float) -> list[Any]:
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None: ...


class Rounds:
    """A worker and its batch, one round at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(args.seed)
        self._width = args.num_steps + 1
        self._logits = torch.randn(
            args.batch_size * self._width, args.vocab_size, generator=generator
        )
        self._reqs = [
            _request(
                f"r{index}",
                output_len=args.output_len,
                vocab_size=args.vocab_size,
                generator=generator,
            )
            for index in range(args.batch_size)
        ]
        best = self._logits.argmax(dim=-1).view(args.batch_size, self._width)
        self._worker = _worker(args.num_steps, args.vocab_size, best[:, :-1].tolist())
        self._worker._target_worker.forward_batch_generation = self._forward
        self._batch = _batch(self._reqs, args.output_len)
        for req in self._reqs:
            self._worker._client.open(rid=req.rid, tokens=[1, 2, 3], rule=_rule())
        self._worker._client.commit(
            rids=[req.rid for req in self._reqs],
            new_tokens=[[4]] * len(self._reqs),
            num_verified=[0] * len(self._reqs),
        )
        self._arms = {arm: _arm(arm, self._reqs) for arm in ARMS}
        self._reporters = _reporters(self._worker._client)

    def _enter(self, arm: str) -> None:
        one = self._arms[arm]
        self._worker._transforms, self._reqs[0].sampling_params = one.transforms, one.params
        self._update_finish_state = one.update_finish_state
        self._worker._reporter = self._reporters.get(arm)

    def _forward(self, batch: Any, *, is_verify: bool) -> Any:
        logits = self._ready.pop()[: len(self._reqs) * batch.spec_info.draft_token_num]
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))

    def _run(self) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        from sglang_ssd.target.verify import SSDDraftInput

        self._ready = [self._logits.clone()]
        self._batch.forward_mode = ForwardMode.DECODE
        bonus = torch.zeros(len(self._reqs), dtype=torch.int64)
        self._batch.spec_info = SSDDraftInput(bonus_tokens=bonus)
        start = time.thread_time()
        result = self._worker.forward_batch_generation(self._batch)
        self.accept_lens = result.accept_lens.tolist()
        for req, accept_len in zip(self._reqs, self.accept_lens, strict=True):
            self._update_finish_state(req, accept_len)
        self.elapsed_ms = (time.thread_time() - start) * 1000

    def round_ms(self, arm: str) -> float:
        self._enter(arm)
        self._run()
        assert min(self.accept_lens) == self._width, "every draft is right"
        assert not any(req.finished() for req in self._reqs), "a round like the one before"
        return self.elapsed_ms


class _NoTransforms:
    def applies_to(self, reqs: Sequence[Any]) -> bool:
        return False


class _Arm(NamedTuple):
    transforms: Any
    params: Any
    """Of the first request."""
    update_finish_state: Callable[[Any, int], None]


def _params(**given: float) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=1 << 20, **given)
    params.normalize(None)
    return params


def _request(rid: str, *, output_len: int, vocab_size: int, generator: torch.Generator) -> Any:
    """SGLang's own; its output stays as long as it is."""
    from sglang.srt.managers.schedule_batch import Req

    req = Req(rid, "", array("q", [1, 2, 3]), _params(), vocab_size=vocab_size, eos_token_ids={-1})
    ids = torch.randint(1000, (output_len,), generator=generator)
    req.output_ids.extend(ids.tolist())
    return req


def _arm(arm: str, reqs: Sequence[Any]) -> _Arm:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ssd.target.row_transforms import RowTransforms

    hooked: Any = Req.update_finish_state
    if arm == "without":
        return _Arm(_NoTransforms(), _params(), hooked.__wrapped__)
    params = _params()
    if arm == "penalised":  # so little that the drafts stay right
        params = _params(frequency_penalty=1e-6, presence_penalty=1e-6, repetition_penalty=1.000001)
    reqs[0].sampling_params = params
    transforms = RowTransforms()
    transforms.start(reqs)
    return _Arm(transforms, params, hooked)


def _reporters(client: Any) -> dict[str, Any]:
    from sglang_ssd.target.metrics import MetricsExporter
    from sglang_ssd.target.reporting import RoundReporter

    exporters = {"reported": None, "exported": MetricsExporter({"model_name": "host"})}
    return {
        arm: RoundReporter(client, exporter=exporter, log_interval=40)
        for arm, exporter in exporters.items()
    }


def _rule() -> Any:
    from sglang_ssd.wire.messages import DraftRule

    return DraftRule()


def _worker(num_steps: int, vocab_size: int, drafts: list[list[int]]) -> Any:
    from sglang_ssd.target.draft_client import DraftClient
    from sglang_ssd.target.reply_deadline import ReplyDeadline
    from sglang_ssd.target.worker import SSDWorker
    from sglang_ssd.trace import Tracer
    from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello

    worker: Any = SSDWorker.__new__(SSDWorker)
    worker._target_worker = SimpleNamespace(random_seed=0)
    worker._device = "cpu"
    worker._num_steps = num_steps
    worker._last_position = 2**20
    worker._tp_group = SimpleNamespace(world_size=1)
    worker._tracer = Tracer(None, "")
    worker._reporter = None
    hello = Hello(
        schema_version=SCHEMA_VERSION,
        target_id="host",
        num_steps=num_steps,
        vocab_size=vocab_size,
        token_map_blocks=[],
        allow_padded_vocab=False,
    )
    worker._client = DraftClient(
        ReadyReplies(drafts),  # type: ignore[arg-type]
        hello=hello,
        deadline=ReplyDeadline(least_s=1.0, most_s=1.0),
        resync_tokens=1 << 20,
    )
    while worker._client.state != "ready":
        worker._client.look(0.0)
    return worker


def _batch(reqs: list[Any], output_len: int) -> Any:
    size = len(reqs)
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.full((size,), 3 + output_len),
        req_pool_indices=torch.arange(size),
        req_to_token_pool=SimpleNamespace(
            req_to_token=torch.zeros((size, output_len + 64), dtype=torch.int32)
        ),
        return_hidden_states=False,
        return_logprob=False,
        has_grammar=False,
        sampling_info=SimpleNamespace(
            is_all_greedy=True, logit_bias=None, has_custom_logit_processor=False
        ),
    )


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of every round, by arm."""
    rng = random.Random(args.seed)
    rounds = Rounds(args)
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for index in tqdm(range(WARM_UP + args.rounds), desc="rounds", leave=False):
        for arm in rng.sample(ARMS, len(ARMS)):
            elapsed = rounds.round_ms(arm)
            if index >= WARM_UP:
                times[arm].append(elapsed)
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians, and the median of the differences of the rounds that ran one after the other."""
    found = {}
    for arm, values in times.items():
        base = times[BASES[arm]]
        difference = statistics.median(
            value - other for value, other in zip(values, base, strict=True)
        )
        found[arm] = {
            "median_ms": statistics.median(values),
            "paired_difference_ms": difference,
            "added": difference / statistics.median(base),
        }
    return found


def failures_of(results: dict[str, dict[str, float]], most_added: float) -> list[str]:
    """What plain requests pay for exact answers to all others, if it is too much."""
    added = results["plain"]["added"]
    if added <= most_added:
        return []
    return [f"plain rounds take {added:.1%} longer, allowed are {most_added:.1%}"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--output-len", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--most-added",
        type=float,
        default=0.03,
        help="share of a round by which the arm plain may be slower (default: 0.03)",
    )
    add_out_flag(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    torch.set_num_threads(1)
    os.environ.setdefault("SGLANG_PLATFORM", "ssd_cpu")
    folder = tempfile.TemporaryDirectory(prefix="bench-host-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder.name  # as SGLang has it, with its costs
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import get_context

    from sglang_ssd.config import ALGORITHM

    get_context().override_server_args(speculative_algorithm=ALGORITHM).install()
    results = summarise(measure(args))
    print_table(
        ["arm", "host CPU ms per round", "added ms (paired)", "added"],
        [
            [
                arm,
                f"{one['median_ms']:.3f}",
                f"{one['paired_difference_ms']:+.4f}",
                f"{one['added']:+.1%}",
            ]
            for arm, one in results.items()
        ],
    )
    failures = failures_of(results, args.most_added)
    for failure in failures:
        print(f"FAILED: {failure}")
    finish("host", args, {"arms": results, "failures": failures})
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
