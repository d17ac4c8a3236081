"""What bench_serving counts: decode windows without prefill, rates from counters, streamed ids."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import measurement


def answer(times: list[float], counts: list[int]) -> measurement.Answer:
    return measurement.Answer(times=times, counts=counts, token_ids=[])


def test_one_answer_decodes_from_its_first_token_on() -> None:
    window = measurement.find_window([answer([500, 600, 800], [1, 3, 6])])
    assert window == measurement.Window(start=500, end=800, tokens=5)


def test_a_batch_counts_only_while_all_rows_decode() -> None:
    early = answer([0, 100, 200, 300], [1, 2, 4, 6])
    late = answer([150, 250, 350, 450], [1, 2, 3, 4])
    # From 150 to 300: the first row went from 2 to 6, the second from 1 to 2.
    window = measurement.find_window([early, late])
    assert window == measurement.Window(start=150, end=300, tokens=5)


def test_answers_that_do_not_meet_give_no_window() -> None:
    assert measurement.find_window([answer([0, 100], [1, 2]), answer([200, 300], [1, 2])]) is None


def test_rates_are_of_what_was_counted_in_between() -> None:
    before = {
        "rows": 10,
        "correct_drafts": 5,
        "on_time_rows": 9,
        "missing_rows": 1,
        "hits": 7,
        "misses": 2,
    }
    after = {
        "rows": 30,
        "correct_drafts": 45,
        "on_time_rows": 28,
        "missing_rows": 2,
        "hits": 25,
        "misses": 4,
    }
    rates = measurement.counted_between(before, after)
    assert rates == pytest.approx({"accept_length": 3.0, "hit_rate": 0.9, "on_time_rate": 0.95})
    assert measurement.counted_between({}, {})["accept_length"] == 1.0


class _Streamer(BaseHTTPRequestHandler):
    """Answers like /generate: three chunks that bring 1, 2 and 1 tokens."""

    repeats_ids = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        ids: list[int] = []
        for new in ([7], [8, 9], [10]):
            ids += new
            chunk = {
                "text": "irrelevant",
                "output_ids": ids if self.repeats_ids else new,
                "meta_info": {"completion_tokens": len(ids)},
            }
            self.wfile.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def streamer() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Streamer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("repeats_ids", [True, False])
def test_ids_are_gathered_however_chunks_bring_them(
    streamer: str, repeats_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Streamer, "repeats_ids", repeats_ids)
    got = measurement.generate(streamer, [1, 2], {"max_new_tokens": 4})
    assert got.counts == [1, 3, 4]
    assert got.token_ids == [7, 8, 9, 10]
