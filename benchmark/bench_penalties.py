r"""What drafts are worth to requests with penalties: each with and without them, in turn.

    python benchmark/bench_penalties.py --target Qwen/Qwen2.5-Coder-1.5B-Instruct \
        --draft Qwen/Qwen2.5-Coder-0.5B-Instruct --num-steps 1

One server, one request at a time. A request without drafts opts out (custom_params={"ssd": false}),
so both kinds run on the same cores, weights and kernels; the drafter is idle meanwhile. Rates count
from the first token of an answer on. Fails if requests with penalties are not faster with drafts
than without, which asks for a drafter that is good and much cheaper than its target.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
from tqdm import tqdm
from transformers import AutoTokenizer

from measurement import Answer, generate
from prompts import add_prompt_flags, chat_tokens, load_prompts
from report import add_out_flag, finish, print_table, warn_if_busy
from servers import Server, ServerSpec

UNPENALISED = "none"
SETTINGS: dict[str, dict[str, object]] = {
    UNPENALISED: {},
    "frequency_penalty 0.5": {"frequency_penalty": 0.5},
    "presence_penalty 0.5": {"presence_penalty": 0.5},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "all three, min_new_tokens": {
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.05,
        "min_new_tokens": 24,
    },
}


class Result(msgspec.Struct, frozen=True):
    """One setting: medians over prompts and repeats."""

    setting: str
    drafts_tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float  # median of the pairs' own ratios
    accept_length: float
    same_answers: float


def tokens_per_s(answer: Answer) -> float:
    return (answer.counts[-1] - answer.counts[0]) / (answer.times[-1] - answer.times[0]) * 1000


def accept_length(answer: Answer) -> float:
    """Tokens a round, the prefill's own left out."""
    return (answer.counts[-1] - 1) / max(1, len(answer.counts) - 1)


def measure(args: argparse.Namespace, server: Server, prompts: list[list[int]]) -> list[Result]:
    pairs: dict[str, list[tuple[Answer, Answer]]] = {name: [] for name in SETTINGS}
    greedy = {"temperature": 0.0, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    for prompt in prompts:
        generate(server.url, prompt, greedy)
    total = args.repeats * len(prompts) * len(SETTINGS)
    with tqdm(total=total, desc="pairs", leave=False) as progress:
        for _ in range(args.repeats):
            for prompt in prompts:
                for name, setting in SETTINGS.items():
                    drafted, plain = (
                        generate(
                            server.url,
                            prompt,
                            {**greedy, **setting, "custom_params": {"ssd": drafts}},
                        )
                        for drafts in (True, False)
                    )
                    pairs[name].append((drafted, plain))
                    progress.update()
    return [_summarise(name, found) for name, found in pairs.items()]


def _summarise(name: str, pairs: list[tuple[Answer, Answer]]) -> Result:
    rates = [(tokens_per_s(drafted), tokens_per_s(plain)) for drafted, plain in pairs]
    return Result(
        setting=name,
        drafts_tokens_per_s=statistics.median(rate for rate, _ in rates),
        plain_tokens_per_s=statistics.median(rate for _, rate in rates),
        ratio=statistics.median(drafted / plain for drafted, plain in rates),
        accept_length=statistics.median(accept_length(drafted) for drafted, _ in pairs),
        same_answers=statistics.fmean(a.token_ids == b.token_ids for a, b in pairs),
    )


def failures_of(results: list[Result]) -> list[str]:
    return [
        f"{one.setting}: {one.ratio:.2f} times the speed of plain decode"
        for one in results
        if one.setting != UNPENALISED and one.ratio <= 1
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="hub id or folder")
    parser.add_argument("--draft", required=True, help="hub id or folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-steps", type=int, default=1)
    parser.add_argument("--fan-out", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline-ms", type=float, default=5000.0, help="of a reply")
    parser.add_argument("--seed", type=int, default=0)
    add_prompt_flags(parser, num_prompts=1)
    add_out_flag(parser)
    return parser.parse_args()


def server_spec(args: argparse.Namespace) -> ServerSpec:
    flags = [
        *("--model-path", args.target, "--dtype", args.dtype),
        *("--speculative-algorithm", "SSD", "--speculative-draft-model-path", args.draft),
        *("--speculative-num-steps", str(args.num_steps), "--ssd-fan-out", str(args.fan_out)),
        *("--ssd-drafter-dtype", args.dtype, "--ssd-reply-deadline-ms", str(args.deadline_ms)),
        *("--max-total-tokens", "4096", "--ssd-drafter-max-total-tokens", "4096"),
        *("--max-running-requests", "2"),
    ]
    return ServerSpec(name="SSD", flags=tuple(flags), traced=False)


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    load_before = os.getloadavg()[0]
    loaded = load_prompts(args)
    token_ids = chat_tokens(loaded.messages, AutoTokenizer.from_pretrained(args.target))
    with tempfile.TemporaryDirectory() as folder:
        server = Server(server_spec(args), Path(folder))
        try:
            server.start()
            results = measure(args, server, token_ids)
        finally:
            server.stop()
    print_table(
        ["penalties", "tok/s with drafts", "tok/s plain", "ratio", "accept length", "same answers"],
        [
            [
                one.setting,
                f"{one.drafts_tokens_per_s:.2f}",
                f"{one.plain_tokens_per_s:.2f}",
                f"{one.ratio:.2f}",
                f"{one.accept_length:.2f}",
                f"{one.same_answers:.0%}",
            ]
            for one in results
        ],
    )
    failures = failures_of(results)
    for failure in failures:
        print(f"FAILED: {failure}")
    figures = {"load_before": load_before, "results": results, "failures": failures}
    finish("penalties", args, figures)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
