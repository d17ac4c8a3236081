"""What the wire costs: request-reply through the real frames and sockets, host time a round.

    python benchmark/bench_wire.py

wire: one process commits B rows over ipc:// or tcp:// loopback, another answers at once with K
drafts a row; the time is that of send and receive with encoding and all checks on both sides.
bare: the same frames over bare sockets of the same kinds, returned unread: what ZMQ and the machine
take of it.
host: what the target's DraftClient adds to a round when the drafts are already there, as after a
hit: the commit that goes out and the collect that finds the reply in the socket.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import zmq
from tqdm import tqdm

from report import add_out_flag, finish, print_table, warn_if_busy
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.reply_deadline import ReplyDeadline
from sglang_ssd.wire.frames import encode
from sglang_ssd.wire.messages import (
    SCHEMA_VERSION,
    DraftClose,
    DraftRule,
    Hello,
    SpeculateReply,
    VerifyCommit,
    Welcome,
)
from sglang_ssd.wire.transport import DrafterSocket, TargetSocket

VOCAB_SIZE = 151936
PROMPT_TOKENS = 512
WARM_UP_ROUNDS = 200
PARTS = ("wire", "bare", "host")
HELLO = Hello(
    schema_version=SCHEMA_VERSION,
    target_id="bench",
    num_steps=1,
    vocab_size=VOCAB_SIZE,
    token_map_blocks=[],
    allow_padded_vocab=False,
)
WELCOME = Welcome(
    schema_version=SCHEMA_VERSION,
    drafter_pid=0,
    vocab_size=VOCAB_SIZE,
    context_len=4096,
    drafter_id="bench",
)


class Times(msgspec.Struct, frozen=True):
    """Microseconds."""

    p50: float
    p99: float


class Row(msgspec.Struct, frozen=True):
    """One line of the table, in microseconds."""

    transport: str
    num_rows: int
    wire: Times
    bare: Times
    host: Times


def answer_at_once(endpoint: str, bound: Connection, num_steps: int, core: int | None) -> None:
    """A drafter that has all drafts: the other process. Ends with the first close_all."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    socket = DrafterSocket(endpoint)
    bound.send(socket.endpoint)
    while True:
        for peer, message, _ in socket.receive(1.0):
            match message:
                case Hello():
                    socket.send(peer, WELCOME)
                case VerifyCommit():
                    socket.send(peer, _reply(message, num_steps), [_drafts(message, num_steps)])
                case DraftClose(close_all=True):
                    socket.close()
                    return


def return_at_once(endpoint: str, bound: Connection, core: int | None) -> None:
    """The other process of a bare exchange. Ends with an empty request."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        bound.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        while (frames := socket.recv_multipart())[1:] != [b""]:
            socket.send_multipart(frames)


def _reply(commit: VerifyCommit, num_steps: int) -> SpeculateReply:
    num_rows = len(commit.rids)
    return SpeculateReply(
        round_id=commit.round_id,
        rids=commit.rids,
        generations=commit.generations,
        base_committed_lens=[
            base + num
            for base, num in zip(commit.base_committed_lens, commit.num_tokens, strict=True)
        ],
        num_drafts=[num_steps] * num_rows,
        served=["hit"] * num_rows,
        bonus_ranks=[0] * num_rows,
    )


def _drafts(commit: VerifyCommit, num_steps: int) -> list[int]:
    return [1000 + index for index in range(num_steps * len(commit.rids))]


@contextmanager
def other_process(kind: str, serve: Callable[..., None], *args: Any) -> Iterator[str]:
    """Its endpoint; told to end by what follows, it is ended if it does not."""
    with tempfile.TemporaryDirectory(prefix="sglang-ssd-bench-") as directory:
        endpoint = f"ipc://{directory}/wire" if kind == "ipc" else "tcp://127.0.0.1:0"
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(endpoint, theirs, *args), daemon=True
        )
        process.start()
        try:
            yield ours.recv()
            process.join(5)
        finally:
            process.terminate()


@contextmanager
def drafter(kind: str, num_steps: int, core: int | None) -> Iterator[TargetSocket]:
    """A socket connected to the answering process."""
    with other_process(kind, answer_at_once, num_steps, core) as endpoint:
        socket = TargetSocket(endpoint)
        try:
            _say_hello(socket)
            yield socket
            socket.send(DraftClose(rids=[], generations=[], close_all=True))
            time.sleep(0.1)  # the close of a socket drops what it has not sent
        finally:
            socket.close()


def _say_hello(socket: TargetSocket) -> None:
    """Until it is answered: what is sent before the connection stands is dropped."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        socket.send(HELLO)
        if socket.receive(0.1):
            return
    raise RuntimeError("the answering process did not come up within 30 s")


def measure_bare(kind: str, *, num_rows: int, num_rounds: int, args: argparse.Namespace) -> Times:
    """Request-reply of one batch's frames, back to back."""
    commit, ids = next(make_commits(num_rows, args.num_steps, args.seed))
    frames, elapsed = encode(commit, [ids]), []
    with (
        other_process(kind, return_at_once, args.drafter_core) as endpoint,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.connect(endpoint)
        for _ in range(WARM_UP_ROUNDS + num_rounds):
            start = time.perf_counter_ns()
            socket.send_multipart(frames)
            socket.recv_multipart()
            elapsed.append(time.perf_counter_ns() - start)
        socket.send(b"")
    return _percentiles(elapsed[WARM_UP_ROUNDS:])


def make_commits(
    num_rows: int, num_steps: int, seed: int
) -> Iterator[tuple[VerifyCommit, list[int]]]:
    """One a round, without end."""
    rng = random.Random(seed)
    rids = [f"{rng.getrandbits(128):032x}" for _ in range(num_rows)]  # as long as SGLang's
    num_tokens = [3] * num_rows
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(sum(num_tokens))]
    for index in itertools.count():
        commit = VerifyCommit(
            round_id=index,
            rids=rids,
            generations=[1] * num_rows,
            base_committed_lens=[PROMPT_TOKENS + index] * num_rows,
            num_verified_drafts=[num_steps] * num_rows,
            num_tokens=num_tokens,
        )
        yield commit, ids


def measure_wire(
    socket: TargetSocket, *, num_rows: int, num_rounds: int, num_steps: int, seed: int
) -> Times:
    """Request-reply of whole batches, back to back."""
    commits, elapsed = make_commits(num_rows, num_steps, seed), []
    for index in range(WARM_UP_ROUNDS + num_rounds):
        start = time.perf_counter_ns()
        commit, ids = next(commits)
        socket.send(commit, [ids])
        received = socket.receive(5.0)
        elapsed.append(time.perf_counter_ns() - start)
        if [len(message.ids) for message in received] != [num_steps * num_rows]:
            raise RuntimeError(f"round {index}: no reply, or a wrong one")
    return _percentiles(elapsed[WARM_UP_ROUNDS:])


def measure_host(
    socket: TargetSocket, *, num_rows: int, num_rounds: int, num_steps: int, verify_s: float
) -> Times:
    """DraftClient.commit and .collect a round; a sleep stands for the verify between them."""
    client = DraftClient(
        socket,
        hello=msgspec.structs.replace(HELLO, num_steps=num_steps),
        deadline=ReplyDeadline(least_s=1.0, most_s=1.0),
        resync_tokens=PROMPT_TOKENS,
    )
    while client.state != "ready":
        client.look(0.1)
    rids = [f"row-{index:028d}" for index in range(num_rows)]
    for rid in rids:
        client.open(rid=rid, tokens=range(PROMPT_TOKENS), rule=DraftRule())
    new_tokens = [[7, 8, 9]] * num_rows
    num_verified = [num_steps] * num_rows
    elapsed = []
    for _ in range(num_rounds):
        start = time.perf_counter_ns()
        client.commit(rids=rids, new_tokens=new_tokens, num_verified=num_verified)
        committed = time.perf_counter_ns()
        time.sleep(verify_s)
        woken = time.perf_counter_ns()
        drafts = client.collect(rids)
        elapsed.append(time.perf_counter_ns() - woken + committed - start)
        if [len(row) for row in drafts] != [num_steps] * num_rows:
            raise RuntimeError(f"drafts did not come: {client.stats}")
    return _percentiles(elapsed)


def measure(transport: str, socket: TargetSocket, num_rows: int, args: argparse.Namespace) -> Row:
    """Both times for one batch size."""
    return Row(
        transport=transport,
        num_rows=num_rows,
        wire=measure_wire(
            socket,
            num_rows=num_rows,
            num_rounds=args.rounds,
            num_steps=args.num_steps,
            seed=args.seed,
        ),
        bare=measure_bare(transport, num_rows=num_rows, num_rounds=args.rounds, args=args),
        host=measure_host(
            socket,
            num_rows=num_rows,
            num_rounds=args.host_rounds,
            num_steps=args.num_steps,
            verify_s=args.verify_ms / 1000,
        ),
    )


def _percentiles(elapsed_ns: list[int]) -> Times:
    p50, p99 = np.percentile(elapsed_ns, [50, 99]) / 1000
    return Times(p50=round(float(p50), 1), p99=round(float(p99), 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--num-steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3000, help="of the wire (default 3000)")
    parser.add_argument("--host-rounds", type=int, default=500, help="of the host (default 500)")
    parser.add_argument(
        "--verify-ms", type=float, default=5.0, help="sleep between commit and collect (default 5)"
    )
    parser.add_argument("--target-core", type=int, help="default: where the system puts it")
    parser.add_argument("--drafter-core", type=int)
    parser.add_argument("--seed", type=int, default=0)
    add_out_flag(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    if args.target_core is not None:
        os.sched_setaffinity(0, {args.target_core})
    rows: list[Row] = []
    with tqdm(total=2 * len(args.rows), desc="transport and rows", leave=False) as progress:
        for transport in ("ipc", "tcp"):
            with drafter(transport, args.num_steps, args.drafter_core) as socket:
                for num_rows in args.rows:
                    rows.append(measure(transport, socket, num_rows, args))
                    progress.update()
    print_table(
        ["transport", "rows", *(f"{what} {p} us" for what in PARTS for p in ("p50", "p99"))],
        [
            [
                *(row.transport, row.num_rows),
                *(getattr(getattr(row, what), p) for what in PARTS for p in ("p50", "p99")),
            ]
            for row in rows
        ],
    )
    finish("wire", args, {"rows": rows})


if __name__ == "__main__":
    main()
