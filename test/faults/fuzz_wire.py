"""Malformed frames at both ends of a served wire: no crash, no wrong token, flat memory.

    .venv/bin/python test/faults/fuzz_wire.py --frames 100000

Messages are damaged by their structure (fields, columns, counts, tags, versions, ids of another
width) and, the smaller part, by their bytes, so that many pass the header and meet what is behind.
They arrive at a DraftLoop and a DraftClient that serve requests meanwhile, under the name of the
honest target as well as of a vandal. Prints a table and, as the last line, one JSON object; fails
if a text is wrong, an end crashes or counts other refusals than the decoder alone makes, fewer than
30% of the refused frames at an end pass the header (whole and of this version), a branch of the
decoder is never taken, or memory grows by more than 20 MB after the first quarter of the frames.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from faults.branch_trace import FunctionBranches
from report import add_out_flag, finish, print_table
from sglang_ssd.wire import frames as wire_frames
from sglang_ssd.wire.fake import Direction, FakeWire, Faults
from sglang_ssd.wire.frames import ProtocolError, decode_to_drafter, decode_to_target, encode
from sglang_ssd.wire.messages import (
    SCHEMA_VERSION,
    DraftClose,
    DrafterStatus,
    DraftRule,
    DraftSync,
    HelloRequest,
    Refusal,
    SpeculateReply,
    StatusRequest,
    ToDrafter,
    ToTarget,
    VerifyCommit,
    Welcome,
)
from toys.toy_server import HELLO, NUM_STEPS, PROMPTS, Server

VOCAB_SIZE = 61
PER_TURN = 40
"""Frames between two rounds of the requests that are served meanwhile."""
TRACED = 4000
"""Frames under the branch trace, which is slow."""
LEAST_HEADER_SHARE = 0.3
AT_THE_HEADER = frozenset({"header", "oversize", "schema_version"})
"""Causes of a refusal for which nothing behind the header was looked at."""
MAX_GROWTH_MB = 20.0
"""As in soak.py."""

_OVERSIZE = bytes(wire_frames.MAX_FRAME_BYTES + 1)
_NESTED = b"\x91" * 9999
"""Lists in lists, as msgpack has them."""

EDGES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 60, 61, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.5, float("nan"), float("inf"), None, True, "", "a", "hit", b"", [], [1], {}),
)


class Tally(msgspec.Struct):
    """What became of the frames that were sent to one end."""

    sent: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    accepted: int = 0

    @property
    def header_share(self) -> float:
        """Of the refused frames, those that were refused behind the header."""
        behind = sum(n for cause, n in self.refused.items() if cause not in AT_THE_HEADER)
        return behind / max(1, sum(self.refused.values()))


class Fuzzer:
    """Damaged messages from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def frames(self, direction: Direction) -> list[bytes]:
        message = self._to_drafter() if direction == "to_drafter" else self._to_target()
        ids = [self._rng.randrange(VOCAB_SIZE) for _ in range(_num_ids(message))]
        frames = encode(message, [ids] if _has_ids(message) else [])
        for _ in range(self._rng.choice([1, 1, 1, 2])):
            frames = self._damage(frames)
        return frames

    def _rid(self) -> str:
        return self._rng.choice([*PROMPTS, "x", ""])

    def _to_drafter(self) -> ToDrafter:
        rng = self._rng
        num_rows = rng.randrange(4)
        rids = [self._rid() for _ in range(num_rows)]
        generations = [rng.randrange(-1, 12) for _ in rids]
        match rng.randrange(8):
            case 0:
                return HELLO
            case 1:
                rule = DraftRule(temperature=rng.choice([0.0, 0.7]), seed=rng.randrange(9))
                length = rng.randrange(1, 40)
                return DraftSync(self._rid(), rng.randrange(12), length, rule)
            case 2:
                return DraftClose(rids, generations, close_all=rng.random() < 0.05)
            case 3:
                return StatusRequest()
            case _:
                return VerifyCommit(
                    round_id=rng.randrange(99),
                    rids=rids,
                    generations=generations,
                    base_committed_lens=[rng.randrange(1, 45) for _ in rids],
                    num_verified_drafts=[rng.randrange(NUM_STEPS + 1) for _ in rids],
                    num_tokens=[rng.randrange(5) for _ in rids],
                )

    def _to_target(self) -> ToTarget:
        rng = self._rng
        rids = [self._rid() for _ in range(rng.randrange(5))]
        match rng.randrange(9):
            case 0:
                name = rng.choice(["", "a", "b"])
                return Welcome(SCHEMA_VERSION, 1, VOCAB_SIZE, 400, drafter_id=name)
            case 1:
                return Refusal(["no"], rng.randrange(-1, 3), ["a", "b"])
            case 2:
                return HelloRequest()
            case 3:
                counts = [rng.randrange(9) for _ in DrafterStatus.__struct_fields__[1:]]
                return DrafterStatus(*counts, refused={"key": 1})
            case _:
                served = rng.choices(["hit", "chain_hit", "jit", "none", "prefill", "unknown"], k=5)
                return SpeculateReply(
                    round_id=rng.randrange(99),
                    rids=rids,
                    generations=[rng.randrange(12) for _ in rids],
                    base_committed_lens=[rng.randrange(45) for _ in rids],
                    num_drafts=[rng.randrange(NUM_STEPS + 3) for _ in rids],
                    served=served[: len(rids)],  # type: ignore[arg-type]
                    bonus_ranks=[rng.randrange(-1, 3) for _ in rids],
                )

    # Damage -------------------------------------------------------------------------------------

    def _damage(self, frames: list[bytes]) -> list[bytes]:
        rng = self._rng
        ways = [self._field, self._field, self._column, self._column, self._count]
        if rng.random() < 0.002:
            return [*frames, _OVERSIZE]
        if rng.random() < 0.01:
            return self._nested(frames)
        ways += [self._id_frame] * 3 + [self._id_values, self._bytes, self._version]
        damaged: list[bytes] = rng.choice(ways)(list(frames))
        return damaged

    def _header(self, frames: list[bytes]) -> dict[str, Any] | None:
        try:
            fields = msgspec.msgpack.decode(frames[0][1:])
        except (msgspec.DecodeError, RecursionError, IndexError):
            return None
        return fields if isinstance(fields, dict) else None

    def _with_header(self, frames: list[bytes], fields: dict[str, Any]) -> list[bytes]:
        return [frames[0][:1] + msgspec.msgpack.encode(fields), *frames[1:]]

    def _field(self, frames: list[bytes]) -> list[bytes]:
        """Another value, a field too few or too many, another tag."""
        fields, rng = self._header(frames), self._rng
        if not fields:
            return frames
        name = rng.choice(list(fields))
        match rng.randrange(6):
            case 0:
                del fields[name]
            case 1:
                fields["surprise"] = rng.choice(EDGES)
            case 2:
                fields["type"] = rng.choice(["hello", "sync", "commit", "close", "reply", "no", 3])
            case _:
                fields[name] = rng.choice(EDGES)
        return self._with_header(frames, fields)

    def _column(self, frames: list[bytes]) -> list[bytes]:
        """One list of the message: shorter, longer, or with another element."""
        fields, rng = self._header(frames), self._rng
        columns = [name for name, value in (fields or {}).items() if isinstance(value, list)]
        if not fields or not columns:
            return frames
        column = fields[rng.choice(columns)]
        match rng.randrange(3):
            case 0 if column:
                column.pop(rng.randrange(len(column)))
            case 1 if column:
                column[rng.randrange(len(column))] = rng.choice(EDGES)
            case _:
                column.append(rng.choice([0, 1, 7, "a", "hit"]))
        return self._with_header(frames, fields)

    def _count(self, frames: list[bytes]) -> list[bytes]:
        """A count of ids that is not theirs."""
        fields, rng = self._header(frames), self._rng
        for name in ("num_tokens", "num_drafts"):
            if fields and isinstance(fields.get(name), list) and fields[name]:
                fields[name][0] = rng.choice([0, 1, 5, 2**20, 2**62, -1])
                return self._with_header(frames, fields)
        if fields and "committed_len" in fields:
            fields["committed_len"] = rng.choice([0, 1, 50, 2**20, 2**62, -1])
            return self._with_header(frames, fields)
        return frames

    def _id_frame(self, frames: list[bytes]) -> list[bytes]:
        """Ids of another width, one frame too few or too many, a frame cut off."""
        rng = self._rng
        match rng.randrange(5):
            case 0:
                return [*frames, rng.randbytes(4 * rng.randrange(3))]
            case 1:
                return frames[:1]
            case 2:
                return [
                    frames[0],
                    *(frame[: rng.randrange(len(frame) + 1)] for frame in frames[1:]),
                ]
            case 3:
                return [frames[0], *(frame * 2 for frame in frames[1:])]  # as int64 would be
            case _:
                return [frames[0], *(b"" for _ in range(rng.randrange(4)))]

    def _id_values(self, frames: list[bytes]) -> list[bytes]:
        """As many ids as declared, but no ids: floats, negative ones, those of no vocabulary."""
        return [frames[0], *(self._rng.randbytes(len(frame)) for frame in frames[1:])]

    def _bytes(self, frames: list[bytes]) -> list[bytes]:
        rng = self._rng
        header = bytearray(frames[0]) if frames else bytearray(1)
        for _ in range(rng.randrange(1, 4)):
            if header:
                header[rng.randrange(len(header))] = rng.randrange(256)
        cut = rng.randrange(len(header) + 1) if rng.random() < 0.3 else len(header)
        return [bytes(header[:cut]), *frames[1:]]

    def _nested(self, frames: list[bytes]) -> list[bytes]:
        """A field more, deeper than any decoder descends."""
        fields = self._header(frames)
        if not fields or len(fields) > 14:  # of a map whose size is in its first byte
            return frames
        packed = msgspec.msgpack.encode(fields)
        header = bytes([packed[0] + 1]) + packed[1:] + b"\xa6deeper" + _NESTED + b"\xc0"
        return [frames[0][:1] + header, *frames[1:]]

    def _version(self, frames: list[bytes]) -> list[bytes]:
        return [
            bytes([self._rng.choice([0, 1, SCHEMA_VERSION + 1, 255])]) + frames[0][1:],
            *frames[1:],
        ]


def _has_ids(message: object) -> bool:
    return isinstance(message, DraftSync | VerifyCommit | SpeculateReply)


def _num_ids(message: object) -> int:
    match message:
        case DraftSync():
            return message.committed_len
        case VerifyCommit():
            return sum(message.num_tokens)
        case SpeculateReply():
            return sum(message.num_drafts)
    return 0


def classify(direction: Direction, frames: list[bytes], tally: Tally) -> None:
    """Run the decoder alone and note how far the frames came."""
    decode = decode_to_drafter if direction == "to_drafter" else decode_to_target
    tally.sent += 1
    try:
        decode(frames)
    except ProtocolError as error:
        tally.refused[error.cause] = tally.refused.get(error.cause, 0) + 1
    else:
        tally.accepted += 1


class Run(msgspec.Struct):
    """The figures of one run."""

    tallies: dict[str, Tally]
    branches_taken: int
    branches: int
    missed: list[str]
    texts_right: int
    rounds: int
    resident_growth_mb: float

    def failures(self) -> list[str]:
        found = [
            f"only {tally.header_share:.0%} of the frames refused {name} passed the header"
            for name, tally in self.tallies.items()
            if tally.header_share < LEAST_HEADER_SHARE
        ]
        found += [f"branch never taken: {way}" for way in self.missed]
        if not self.texts_right:
            found.append("no text was finished meanwhile")
        growth = self.resident_growth_mb
        if growth > MAX_GROWTH_MB:
            found.append(f"memory grew by {growth:.1f} MB, allowed are {MAX_GROWTH_MB:g}")
        return found


def fuzz(num_frames: int, seed: int) -> Run:
    """num_frames at each end; AssertionError if anything but the frames went wrong."""
    fuzzer = Fuzzer(seed)
    wire = FakeWire(seed=seed, tick_s=0.02)
    tallies = {"to_drafter": Tally(), "to_target": Tally()}
    branches = FunctionBranches(_decoder_functions())
    right = rounds = 0
    server = _served(wire)
    resident = 0.0
    for sent in range(0, num_frames, PER_TURN):
        for direction, tally in tallies.items():
            batch = [fuzzer.frames(direction) for _ in range(min(PER_TURN, num_frames - sent))]
            if sent < TRACED:
                with branches:
                    for frames in batch:
                        classify(direction, frames, tally)
            else:
                for frames in batch:
                    classify(direction, frames, tally)
            _post(wire, direction, batch, vandal=bool(sent // PER_TURN % 2))
        server.round()
        rounds += 1
        if not server.unfinished():
            server.expect_plain_texts()
            right += len(server.texts)
            _check_counters(wire, server, tallies)
            server.begin_again(*server.texts)
        if sent <= num_frames // 4:
            resident = _resident_mb()
    _check_counters(wire, server, tallies)
    return Run(
        tallies=tallies,
        branches_taken=len(branches.taken),
        branches=len(branches.all),
        missed=[" ".join(map(str, way)) for way in sorted(branches.all - branches.taken)],
        texts_right=right,
        rounds=rounds,
        resident_growth_mb=_resident_mb() - resident,
    )


def _served(wire: FakeWire) -> Server:
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(Faults(), Faults())
    wire.target(b"vandal").send(HELLO)
    return server


def _post(wire: FakeWire, direction: Direction, batch: list[list[bytes]], *, vandal: bool) -> None:
    peer = b"vandal" if vandal and direction == "to_drafter" else b"target"
    for frames in batch:
        wire.post(direction, peer, frames)


def _check_counters(wire: FakeWire, server: Server, tallies: dict[str, Tally]) -> None:
    """Each end has refused what the decoder alone refuses, by the same causes."""
    wire.wait()
    server.client.look()
    ends = {"to_drafter": wire.drafter.stats, "to_target": server.client.transport_stats}
    for name, stats in ends.items():
        assert stats.refused == tallies[name].refused, f"refusals {name} do not add up"
        assert sum(stats.refused.values()) == stats.malformed


def _decoder_functions() -> list[FunctionType]:
    names = ("_decode", "_decode_ids", "_num_ids", "_check_columns")
    return [getattr(wire_frames, name) for name in names]


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=100_000, help="at each end")
    parser.add_argument("--seed", type=int, default=0)
    add_out_flag(parser)
    args = parser.parse_args()
    run = fuzz(args.frames, args.seed)
    print_table(
        ["end", "frames", "accepted", "refused past the header", "refused"],
        [
            [name, one.sent, one.accepted, f"{one.header_share:.0%}", _shown(one.refused)]
            for name, one in run.tallies.items()
        ],
    )
    failures = run.failures()
    for failure in failures:
        print(f"FAILED: {failure}")
    finish("fuzz_wire", args, {**msgspec.structs.asdict(run), "failures": failures})
    sys.exit(1 if failures else 0)


def _shown(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    main()
