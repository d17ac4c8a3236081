"""Programs of SGLang's frontend language, and what two servers make of them."""

from __future__ import annotations

from typing import Any

import sglang as sgl
from sglang.lang.choices import unconditional_likelihood_normalized

from harness.grammars import SCHEMA
from harness.server import Server

CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Paris", "Quito", "Delhi", "Rome")
THOUGHT = r"<think>[a-z][a-z ]{7,15}</think> [A-Z][a-z ]{6,12}\."
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
def interview(s: Any, city: str) -> Any:
    """Roles in both forms, a scored answer, one with a thought, a choice by gen, what is typed."""
    s += sgl.system("You know every city.")
    with s.user():
        s += f"Tell me about {city}."
    with s.assistant(), s.var_scope("said"):
        s += "Well," + sgl.gen("intro", max_tokens=16, stop="\n")
    s.user("Is it old?")
    scores = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    s += sgl.assistant(sgl.gen("scored", max_tokens=12, **scores))
    s += sgl.user("Think of its name.")
    thought = sgl.gen("thought", max_tokens=60, regex=THOUGHT)
    s += sgl.separate_reasoning(sgl.assistant(thought), model_type="qwen3")
    s += "\nIs it large?" + sgl.gen("large", choices=[" YES", " NO", " HARD TO SAY"])
    s += "\nPeople: " + sgl.gen_int("people", max_tokens=6)
    s += "\nShare: " + sgl.gen("share", max_tokens=6, dtype=float)
    s += "\nOld: " + sgl.gen("old", max_tokens=4, dtype=bool)
    s += "\nName: " + sgl.gen_string("name", max_tokens=12)
    s += "\nJSON: " + sgl.gen("json", max_tokens=48, json_schema=SCHEMA)


@sgl.function
def gather(s: Any, city: str) -> Any:
    """A copy whose text is thrown away, and a group of forks that is filled and joined as one."""
    s += f"Three facts about {city}.\n"
    with s.copy() as aside:
        aside += "By the way," + sgl.gen("intro", max_tokens=12)
    forks = s.fork(3)
    forks += lambda index: f"{index + 1}."
    forks += [" It", " Its people", " Its river"]
    forks += sgl.gen("fact", max_tokens=12, stop="\n")
    forks.join()
    s += " ".join(s["fact"]) + "\nBest:" + sgl.gen("large", choices=[" 1", " 2", " 3"])


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
