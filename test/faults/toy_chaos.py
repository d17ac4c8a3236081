"""The same kinds of faults as chaos.py over the fake wire: deterministic, in one thread.

    .venv/bin/python test/faults/toy_chaos.py --faults 200

Eight requests are always in flight; one that ends is compared with plain decoding and another takes
its place under the same name. A fault lasts some rounds and is followed by peace for as many at
least. Prints one line by kind and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from faults.fuzz_wire import Fuzzer
from report import add_out_flag, finish, print_table
from sglang_ssd.wire.fake import Direction, FakeWire, Faults
from sglang_ssd.wire.frames import ProtocolError, decode_to_drafter, decode_to_target, encode
from sglang_ssd.wire.messages import SpeculateReply, VerifyCommit
from toys.toy_server import NUM_TOKENS, Server, plain_text

IN_FLIGHT = 8
PEACE_ROUNDS = 6
MOST_ROUNDS_TO_A_HIT = 12
KINDS = ("kill", "restart", "stop", "slow", "garbage", "generations", "cut")


class ToyChaos:
    """One run of a schedule."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fuzzer = Fuzzer(seed)
        self._wire = RecordingWire(seed=seed, tick_s=0.02)
        self._names = {f"r{n}": name for n, name in zip(range(IN_FLIGHT), 2 * "abcd", strict=True)}
        self.server = Server(self._wire, draft_seed=0, backup="jit", cases=self._names)
        self.server.start(Faults(), Faults())
        self.rounds_to_a_hit: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.num_answers = 0

    def run(self, num_faults: int) -> None:
        kinds = [KINDS[n % len(KINDS)] for n in range(num_faults)]
        self._rng.shuffle(kinds)
        for kind in kinds:
            self._play(PEACE_ROUNDS)
            lasts = self._rng.randrange(1, 4)
            inflict: Callable[[int], None] = getattr(self, f"_{kind}")
            inflict(lasts)
            self.rounds_to_a_hit[kind].append(self._play_until_hit())
            self._play(lasts)

    def end(self) -> None:
        """Nothing must be left."""
        self.server.client.note_idle()
        for _ in range(30):
            self._wire.tick()
            self.server.step_drafter()

    def _play(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.server.round()
            for rid in [r for r in self._names if r not in self.server.unfinished()]:
                expected = plain_text(self._names[rid])
                assert self.server.texts[rid][: len(expected)] == expected, f"{rid} differs"
                self.num_answers += 1
                self.server.begin_again(rid)

    def _play_until_hit(self) -> int:
        hits = self.server.client.stats.hits
        for count in range(1, MOST_ROUNDS_TO_A_HIT + 1):
            self._play(1)
            if self.server.client.stats.hits > hits:
                return count
        raise AssertionError(f"no hit within {MOST_ROUNDS_TO_A_HIT} rounds")

    # The faults ---------------------------------------------------------------------------------

    def _kill(self, lasts: int) -> None:
        """Nobody is there for some rounds; then another drafter is."""
        self.server.drafter_runs = False
        for direction in ("to_drafter", "to_target"):
            self._wire.kill(direction)
        self._play(lasts)
        for direction in ("to_drafter", "to_target"):
            self._wire.revive(direction)
        self._restart(lasts)
        self.server.drafter_runs = True

    def _restart(self, lasts: int) -> None:
        self.server.loop = self.server.new_drafter()

    def _stop(self, lasts: int) -> None:
        self.server.drafter_runs = False
        self._play(lasts)
        self.server.drafter_runs = True

    def _slow(self, lasts: int) -> None:
        self._wire.faults["to_target"] = Faults(delay=self._rng.randrange(4, 30))
        self._play(lasts)
        self._wire.faults["to_target"] = Faults()

    def _cut(self, lasts: int) -> None:
        """One direction loses everything."""
        direction: Direction = self._rng.choice(["to_drafter", "to_target"])
        self._wire.kill(direction)
        self._play(lasts)
        self._wire.revive(direction)

    def _garbage(self, lasts: int) -> None:
        for _ in range(20 * lasts):
            for direction in ("to_drafter", "to_target"):
                self._wire.post(direction, b"target", self._fuzzer.frames(direction))

    def _generations(self, lasts: int) -> None:
        for direction, frames in list(self._wire.recorded):
            decode = decode_to_drafter if direction == "to_drafter" else decode_to_target
            try:
                message, ids = decode(frames)
            except ProtocolError:
                continue
            if isinstance(message, SpeculateReply | VerifyCommit):
                change = self._rng.choice([0, -1, 1, 7])
                generations = [generation + change for generation in message.generations]
                altered = msgspec.structs.replace(message, generations=generations)
                self._wire.post(direction, b"target", encode(altered, [ids]))


class RecordingWire(FakeWire):
    """Keeps what passed last, for those who repeat it later."""

    def __init__(self, *, seed: int, tick_s: float) -> None:
        self.recorded: deque[tuple[Direction, list[bytes]]] = deque(maxlen=30)
        super().__init__(seed=seed, tick_s=tick_s)

    def post(self, direction: Direction, peer: bytes, frames: list[bytes]) -> None:
        if len(frames) == 2 and len(frames[1]) < 4 * NUM_TOKENS * IN_FLIGHT:
            self.recorded.append((direction, frames))
        super().post(direction, peer, frames)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    add_out_flag(parser)
    args = parser.parse_args()
    chaos = ToyChaos(args.seed)
    chaos.run(args.faults)
    chaos.end()
    stats = chaos.server.client.stats
    print_table(
        ["fault", "times", "rounds to a hit, most"],
        [[kind, len(rounds), max(rounds)] for kind, rounds in chaos.rounds_to_a_hit.items()],
    )
    figures = {
        "answers": chaos.num_answers,
        "hit_share": stats.hits / stats.rows,
        "plain_decode": stats.plain_decode,
        "rounds_to_a_hit": chaos.rounds_to_a_hit,
        "live_sequences": chaos.server.loop.table.num_live,
    }
    finish("toy_chaos", args, figures)


if __name__ == "__main__":
    main()
