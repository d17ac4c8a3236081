"""Programs of SGLang's frontend language, and what two servers make of them."""

from __future__ import annotations

from typing import Any

import sglang as sgl
from sglang.lang.choices import unconditional_likelihood_normalized

from harness.server import Server

CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Paris", "Quito", "Delhi", "Rome")
METHODS = {
    "by length": sgl.token_length_normalized,
    "by token": sgl.greedy_token_selection,
    "unconditional": unconditional_likelihood_normalized,
}


@sgl.function
def tour(s: Any, city: str) -> Any:
    """Forks of an empty and of a filled state, every kind of stop, a regex, a choice."""
    for fork, word in zip(s.fork(2), ("Hello", "Dear"), strict=True):
        fork += f"{word} {city}," + sgl.gen("greeting", max_tokens=6)
    s += f"Q: Tell me about {city}.\nA:" + sgl.gen("intro", max_tokens=24, stop="\n")
    forks = s.fork(3)
    for fork, topic in zip(forks, ("food", "weather", "history"), strict=True):
        fork += f"\nAbout its {topic}:"
        fork += sgl.gen("detail", max_tokens=16, stop=["\n", "."])
    s += "\nFood: " + forks[0]["detail"] + "\nFounded in the year "
    s += sgl.gen("year", max_tokens=6, regex=r"[12][0-9]{3}")
    s += "\nIn short:" + sgl.gen("short", max_tokens=16, stop_regex=r"[.,!?]")
    s += "\nIs it large?" + sgl.select("large", choices=[" YES", " NO", " HARD TO SAY"])


@sgl.function
def introduce(s: Any, city: str) -> Any:
    s += f"Q: Tell me about {city}.\nA:" + sgl.gen("intro", max_tokens=24, stop="\n")


@sgl.function
def choose(s: Any, city: str, method: str) -> Any:
    """Scoring alone: no request of it has a token to decode."""
    choices = [" Europe", " Africa", " the sea"]
    s += f"{city} lies in" + sgl.select("where", choices=choices, choices_method=METHODS[method])


def run_batch(program: Any, server: Server, cities: tuple[str, ...], **given: Any) -> list[Any]:
    """The final states."""
    states: list[Any] = program.run_batch(
        [{"city": city, **given} for city in cities],
        temperature=0,
        backend=sgl.RuntimeEndpoint(server.url),
        num_threads=3,
    )
    return states


def run_streamed(program: Any, server: Server, city: str) -> Any:
    """The final state, once the pieces have been seen to join: of its intro, and of everything.

    Only the pieces of everything end with the program: `state.text()` does not wait for lines of
    it that have not run yet.
    """
    backend = sgl.RuntimeEndpoint(server.url)
    state = program.run(city=city, temperature=0, backend=backend, stream=True)
    assert "".join(state.text_iter("intro")) == state["intro"]
    assert "".join(state.text_iter()) == state.text()
    return state
