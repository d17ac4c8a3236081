"""A program of SGLang's frontend language against the server: fork, gen and select.

python examples/sgl_frontend.py [--url http://127.0.0.1:30000]
"""

from __future__ import annotations

import argparse
from typing import Any
from urllib.error import URLError

import sglang as sgl

TOPICS = ("sleep", "walking")


@sgl.function
def advise(s: Any, question: str) -> None:
    """Two pieces of advice side by side from one prefix, then a choice between them."""
    s += f"Question: {question}\n"
    forks = s.fork(len(TOPICS))
    for fork, topic in zip(forks, TOPICS, strict=True):
        fork += f"Advice about {topic}: " + sgl.gen("advice", max_tokens=24, stop="\n")
    for fork, topic in zip(forks, TOPICS, strict=True):
        s += f"Advice about {topic}: {fork['advice']}\n"
    s += "The better advice is about " + sgl.select("choice", choices=list(TOPICS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run an sgl program against a server.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the server")
    url = parser.parse_args().url.rstrip("/")
    try:
        sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    except URLError:
        raise SystemExit(f"no server answers at {url}; --url names another") from None
    state = advise.run(question="How do I feel fresh in the morning?", temperature=0)
    print(state.text())
    print(f"\nchosen: {state['choice']}")


if __name__ == "__main__":
    main()
