"""A drafter without a model: it has read the answers before, and starts in a moment.

The real DraftLoop on the real socket; only the model is a table of what follows which tokens, so
that a server's drafter can be killed a hundred times in minutes. Contexts that are in no sequence
of the table get a fixed wrong guess.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.loop import DraftLoop
from sglang_ssd.drafter.model_step import BranchRows, ExtendRow
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.transport import DrafterSocket

CONTEXT = 12
"""Tokens before a token that tell it."""


class LookupModel:
    """Implements ModelStep: a slot keeps the token that was fed to it."""

    def __init__(self, sequences: Sequence[Sequence[int]], *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.context_len = 2048
        self.total_slots = 40_000
        self._tokens = np.zeros(self.total_slots + 1, dtype=np.int64)
        self._next: dict[tuple[int, ...], int] = {}
        for sequence in sequences:
            for end in range(1, len(sequence)):
                self._next[tuple(sequence[max(0, end - CONTEXT) : end])] = sequence[end]

    def extend(self, rows: Sequence[ExtendRow]) -> torch.Tensor:
        contexts = []
        for row in rows:
            self._tokens[row.kv_slots[-len(row.token_ids) :]] = row.token_ids
            contexts.append(self._tokens[row.kv_slots[-CONTEXT:]])
        return self._logits(contexts)

    def branch_step(self, rows: Sequence[BranchRows]) -> torch.Tensor:
        contexts = []
        for row in rows:
            self._tokens[row.kv_slots[-len(row.token_ids) :]] = row.token_ids
            seen = self._tokens[row.kv_slots]
            contexts += [seen[mask][-CONTEXT:] for mask in row.mask.numpy()]
        return self._logits(contexts)

    def _logits(self, contexts: Sequence[np.ndarray]) -> torch.Tensor:  # [R, V]
        """The known token far above the rest, and one more for the guesses beside it."""
        logits = torch.zeros((len(contexts), self.vocab_size))
        for row, context in zip(logits, contexts, strict=True):
            last = int(context[-1])
            row[(last + 1) % self.vocab_size] = 40.0
            row[self._next.get(tuple(context.tolist()), last)] = 80.0
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--table", type=Path, required=True, help="JSON: a list of lists of ids")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_watch, args=(args.parent_pid,), daemon=True).start()
    loop = DraftLoop(
        model=LookupModel(json.loads(args.table.read_text()), vocab_size=args.vocab_size),
        transport=DrafterSocket(args.endpoint),
        config=SsdConfig(fan_out=[1]),
        max_sequences=32,
        tokens=[],
        tracer=Tracer(None, ""),
    )
    print("ready", flush=True)
    while True:
        loop.step(1.0)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
