r"""AR, SD and SSD of one target and draft, interleaved in one run: decode tokens a second.

    python benchmark/bench_serving.py --target Qwen/Qwen2.5-Coder-1.5B-Instruct \
        --draft Qwen/Qwen2.5-Coder-0.5B-Instruct --sd-steps 2 3 4 --ssd-steps 1 2 3 4

AR    no speculation, on the faster of two attention backends; on the target's cores and on all.
SD    --ssd-mode sync: the same drafter drafts after the outcome. On the target's and the drafter's
      own cores, and with all cores for both (they take turns).
SSD   this project.

First a short sweep finds the best backend and the best K of SD and of SSD per batch size; then the
winners are measured in turn, --repeats times, and medians are reported. A server that is not being
measured is down or stopped (servers.py); what counts as decoding says measurement.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from tqdm import tqdm
from transformers import AutoTokenizer

from measurement import Measurement, RoundFigures, Sampling, measure, round_figures
from prompts import add_prompt_flags, chat_tokens, load_prompts
from report import add_out_flag, finish, print_table, warn_if_busy
from servers import Server, ServerPool, ServerSpec
from sglang_ssd.config import SsdConfig
from sglang_ssd.platform.affinity import format_cores, lent_cores, parse_cores, split_cores

AR_BACKENDS = ("ssd_cpu", "torch_native")


class Candidate(msgspec.Struct, frozen=True):
    """One server of the comparison. Of each group the best is measured in full."""

    group: str  # AR, AR all cores, SD, SD all cores, SSD
    detail: str
    num_steps: int
    spec: ServerSpec

    @property
    def name(self) -> str:
        return self.spec.name


class Result(msgspec.Struct, frozen=True):
    """A line of the table: medians over the repeats."""

    batch_size: int
    group: str
    detail: str
    num_steps: int
    tokens_per_s: float
    runs: list[float]
    accept_length: float
    hit_rate: float
    on_time_rate: float
    new_tokens: float
    same_answers_as_ar: float
    rounds: RoundFigures | None


# Servers ----------------------------------------------------------------------------------------


def list_candidates(args: argparse.Namespace) -> list[Candidate]:
    all_cores = format_cores({*parse_cores(args.target_cores), *parse_cores(args.drafter_cores)})
    found = []
    for group, cores in (("AR", args.target_cores), ("AR all cores", all_cores)):
        for backend in AR_BACKENDS:
            flags = ["--attention-backend", backend, "--ssd-target-cores", cores]
            found.append(_candidate(args, group, f"cores {cores}, {backend}", 0, flags))
    own = (args.target_cores, args.drafter_cores)
    for steps in args.sd_steps:
        found.append(_speculating(args, "SD", steps, own))
    for steps in args.sd_steps:
        found.append(_speculating(args, "SD all cores", steps, (all_cores, all_cores)))
    for steps in args.ssd_steps:
        found.append(_speculating(args, "SSD", steps, own))
    return [one for one in found if one.group in args.groups]


def _speculating(
    args: argparse.Namespace, group: str, num_steps: int, cores: tuple[str, str]
) -> Candidate:
    flags = [
        *("--speculative-algorithm", "SSD", "--speculative-draft-model-path", args.draft),
        *("--speculative-num-steps", str(num_steps)),
        *("--ssd-target-cores", cores[0], "--ssd-drafter-cores", cores[1]),
        *("--ssd-drafter-dtype", args.draft_dtype),
        *("--ssd-drafter-max-total-tokens", str(args.max_total_tokens)),
        *("--ssd-reply-deadline-ms", str(args.deadline_ms)),
    ]
    detail = f"cores {cores[0]} + {cores[1]}"
    if group == "SSD":
        fan_out = ",".join(map(str, args.fan_out))
        flags += ["--ssd-mode", "async", "--ssd-fan-out", fan_out, "--ssd-backup", args.backup]
        detail += f", F={fan_out}"
    else:
        flags += ["--ssd-mode", "sync"]
    return _candidate(args, group, detail, num_steps, flags)


def _candidate(
    args: argparse.Namespace, group: str, detail: str, num_steps: int, flags: Sequence[str]
) -> Candidate:
    common = [
        *("--model-path", args.target, "--dtype", args.dtype),
        *("--random-seed", str(args.seed), "--disable-radix-cache"),
        *("--max-total-tokens", str(args.max_total_tokens)),
        *("--max-running-requests", str(max(args.batch_sizes))),
    ]
    name = f"{group} K={num_steps} {detail}" if num_steps else f"{group} {detail}"
    spec = ServerSpec(name=name, flags=(*common, *flags, *args.server_flags), traced=num_steps > 0)
    return Candidate(group=group, detail=detail, num_steps=num_steps, spec=spec)


# The comparison ---------------------------------------------------------------------------------


class Comparison:
    """Sweep, then the winners in turn. Keeps every measurement by (batch size, candidate)."""

    def __init__(
        self,
        args: argparse.Namespace,
        prompts: Sequence[list[int]],
        pool: ServerPool,
        progress: tqdm[None],
    ) -> None:
        self._args = args
        self._prompts = prompts
        self._pool = pool
        self._progress = progress

    def sweep(self, candidates: Sequence[Candidate]) -> dict[tuple[int, str], Measurement]:
        """Each candidate once, short, at every batch size while its server is up."""
        args = self._args
        found = {}
        for candidate in candidates:
            with self._pool.use(candidate.spec) as server:
                for batch_size in args.batch_sizes:
                    num_prompts = max(batch_size, args.sweep_prompts)
                    found[batch_size, candidate.name] = self._measure(
                        server, self._prompts[:num_prompts], batch_size, args.sweep_tokens
                    )
        return found

    def run(self, chosen: dict[int, list[Candidate]]) -> dict[tuple[int, str], list[Measurement]]:
        """--repeats times: every server in turn, at the batch sizes that it was chosen for."""
        servers = {one.name: one for winners in chosen.values() for one in winners}
        found: dict[tuple[int, str], list[Measurement]] = {}
        for _ in range(self._args.repeats):
            for name, candidate in servers.items():
                with self._pool.use(candidate.spec) as server:
                    for batch_size, winners in chosen.items():
                        if candidate in winners:
                            measured = self._measure(
                                server, self._prompts, batch_size, self._args.new_tokens
                            )
                            found.setdefault((batch_size, name), []).append(measured)
        return found

    def _measure(
        self, server: Server, prompts: Sequence[list[int]], batch_size: int, new_tokens: int
    ) -> Measurement:
        self._progress.set_description(f"{server.spec.name}: batch {batch_size}")
        measured = measure(
            server,
            prompts,
            batch_size=batch_size,
            new_tokens=new_tokens,
            sampling=Sampling(
                temperature=self._args.temperature,
                ignore_eos=self._args.ignore_eos,
                seed=self._args.seed,
            ),
        )
        self._progress.update()
        self._progress.write(
            f"  {server.spec.name}, batch {batch_size}: {measured.tokens_per_s:.2f} tok/s, "
            f"accept length {measured.accept_length:.2f}",
            file=sys.stderr,
        )
        return measured


def groups_of(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.group, []).append(candidate)
    return groups


def choose(
    candidates: Sequence[Candidate],
    batch_sizes: Sequence[int],
    swept: dict[tuple[int, str], Measurement],
) -> dict[int, list[Candidate]]:
    """The fastest of every group by batch size."""
    return {
        batch_size: [
            max(group, key=lambda one: swept[batch_size, one.name].tokens_per_s)
            if len(group) > 1
            else group[0]
            for group in groups_of(candidates).values()
        ]
        for batch_size in batch_sizes
    }


def summarize(
    chosen: dict[int, list[Candidate]],
    measured: dict[tuple[int, str], list[Measurement]],
    trace_files: Callable[[str], list[Path]],
) -> list[Result]:
    results = []
    for batch_size, winners in chosen.items():
        reference = next((one.name for one in winners if one.group.startswith("AR")), None)
        expected = measured[batch_size, reference][0].answers if reference else []
        for one in winners:
            runs = measured[batch_size, one.name]
            rates = [run.tokens_per_s for run in runs]
            windows = [window for run in runs for window in run.windows]
            results.append(
                Result(
                    batch_size=batch_size,
                    group=one.group,
                    detail=one.detail,
                    num_steps=one.num_steps,
                    tokens_per_s=statistics.median(rates),
                    runs=rates,
                    accept_length=statistics.median(run.accept_length for run in runs),
                    hit_rate=statistics.median(run.hit_rate for run in runs),
                    on_time_rate=statistics.median(run.on_time_rate for run in runs),
                    new_tokens=statistics.fmean(run.new_tokens for run in runs),
                    same_answers_as_ar=share_equal(runs[0].answers, expected),
                    rounds=round_figures(trace_files(one.name), windows),
                )
            )
    return results


def share_equal(answers: Sequence[list[int]], expected: Sequence[list[int]]) -> float:
    """In bf16 a near tie may fall differently with the batch shape; in fp32 this is 1."""
    pairs = zip(answers, expected, strict=False)
    return statistics.fmean([a == b for a, b in pairs] or [0.0])


def ratios(results: Sequence[Result]) -> dict[int, dict[str, float]]:
    """By batch size: SSD over every other group."""
    found: dict[int, dict[str, float]] = {}
    for ssd in results:
        if ssd.group == "SSD":
            found[ssd.batch_size] = {
                f"SSD / {other.group}": round(ssd.tokens_per_s / other.tokens_per_s, 3)
                for other in results
                if other.batch_size == ssd.batch_size and other is not ssd
            }
    return found


def print_results(results: Sequence[Result]) -> None:
    headers = [
        *("batch", "server", "K", "on", "tok/s", "x AR", "accept length", "hit rate"),
        *("on time", "round / verify", "wait ms", "host ms", "drafting under verify"),
    ]
    base = {one.batch_size: one.tokens_per_s for one in results if one.group == "AR"}
    rows = []
    for one in results:
        rounds = one.rounds
        speculates = one.num_steps > 0
        ratio = f"{one.tokens_per_s / base[one.batch_size]:.2f}" if base else ""
        rows.append(
            [
                *(one.batch_size, one.group, one.num_steps or "", one.detail),
                f"{one.tokens_per_s:.2f} ({min(one.runs):.2f}-{max(one.runs):.2f})",
                ratio,
                f"{one.accept_length:.2f}",
                f"{one.hit_rate:.2f}" if one.group == "SSD" else "",
                f"{one.on_time_rate:.2f}" if speculates else "",
                f"{rounds.round_over_verify:.2f}" if rounds else "",
                f"{rounds.wait_ms:.1f}" if rounds else "",
                f"{rounds.host_ms:.1f}" if rounds else "",
                f"{rounds.drafting_under_verify:.0%}" if rounds else "",
            ]
        )
    print_table(headers, rows)


def print_sweep(
    candidates: Sequence[Candidate], swept: dict[tuple[int, str], Measurement]
) -> list[dict[str, object]]:
    """Every candidate of the sweep; SD and SSD at equal K have equal accept lengths."""
    rows = [
        {
            "batch_size": batch_size,
            "group": one.group,
            "detail": one.detail,
            "num_steps": one.num_steps,
            "tokens_per_s": round(swept[batch_size, one.name].tokens_per_s, 2),
            "accept_length": round(swept[batch_size, one.name].accept_length, 3),
            "hit_rate": round(swept[batch_size, one.name].hit_rate, 3),
        }
        for batch_size in dict.fromkeys(batch for batch, _ in swept)
        for one in candidates
        if (batch_size, one.name) in swept
    ]
    if rows:
        print("Sweep (short, once; it only chooses):")
        print_table(
            ["batch", "server", "on", "K", "tok/s", "accept length", "hit rate"],
            [list(row.values()) for row in rows],
        )
        print()
    return rows


# The command ------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    split = split_cores(SsdConfig(), lent_cores())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="hub id or folder")
    parser.add_argument("--draft", required=True, help="hub id or folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-dtype", default="bfloat16")
    parser.add_argument("--sd-steps", type=int, nargs="+", default=[2, 3, 4], metavar="K")
    parser.add_argument("--ssd-steps", type=int, nargs="+", default=[1, 2, 3, 4], metavar="K")
    parser.add_argument("--fan-out", type=int, nargs="+", default=[3], metavar="F")
    parser.add_argument("--backup", choices=["jit", "none"], default="jit")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4], metavar="B")
    parser.add_argument("--new-tokens", type=int, default=256, help="an answer (default 256)")
    parser.add_argument("--repeats", type=int, default=3, help="medians of this many (default 3)")
    parser.add_argument("--sweep-prompts", type=int, default=2)
    parser.add_argument("--sweep-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of an answer")
    parser.add_argument("--target-cores", default=format_cores(split.target))
    parser.add_argument("--drafter-cores", default=format_cores(split.drafter))
    parser.add_argument(
        "--groups",
        nargs="+",
        default=["AR", "AR all cores", "SD", "SD all cores", "SSD"],
        help="leave some out",
    )
    parser.add_argument("--deadline-ms", type=float, default=5000.0, help="of a reply")
    parser.add_argument("--max-total-tokens", type=int, default=16384, help="KV slots of a server")
    parser.add_argument(
        "--servers-up",
        type=int,
        default=1,
        help="servers that may be up at once, idle ones stopped; 1 (default) starts each "
        "anew, more saves the starts and needs memory for as many targets and drafts",
    )
    parser.add_argument(
        "--server-flags", nargs=argparse.REMAINDER, default=[], help="flags for all servers"
    )
    parser.add_argument("--logs", type=Path, help="keep the servers' logs and traces here")
    parser.add_argument("--seed", type=int, default=0)
    add_prompt_flags(parser, num_prompts=4)
    add_out_flag(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    load_before = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # through the finally below
    prompts = load_prompts(args)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    token_ids = chat_tokens(prompts.messages, tokenizer)
    candidates = list_candidates(args)
    contested = [c for group in groups_of(candidates).values() if len(group) > 1 for c in group]
    num_final = len(groups_of(candidates)) * args.repeats
    total = (len(contested) + num_final) * len(args.batch_sizes)

    with tempfile.TemporaryDirectory(prefix="sglang-ssd-bench-") as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with tqdm(total=total, unit="run", dynamic_ncols=True) as progress:
            pool = ServerPool(folder, num_up=args.servers_up, announce=progress.set_description)
            try:
                comparison = Comparison(args, token_ids, pool, progress)
                swept = comparison.sweep(contested)
                chosen = choose(candidates, args.batch_sizes, swept)
                measured = comparison.run(chosen)
            finally:
                pool.stop_all()
        results = summarize(chosen, measured, pool.trace_files)
    sweep_rows = print_sweep(candidates, swept)
    print_results(results)
    for batch_size, found in ratios(results).items():
        print(f"batch {batch_size}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()))
    finish(
        "serving",
        args,
        {
            "load_before": round(load_before, 2),
            "prompts": prompts.source,
            "ratios": ratios(results),
            "results": results,
            "sweep": sweep_rows,
        },
    )


if __name__ == "__main__":
    main()
