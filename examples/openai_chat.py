"""Chat with the server through the OpenAI client, once whole and once streamed.

python examples/openai_chat.py [--url http://127.0.0.1:30000]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from openai import APIConnectionError, OpenAI

QUESTION = "Name the three primary colours and one thing of each."


def ask(client: OpenAI, model: str) -> str:
    """The whole answer at once."""
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=64,
    )
    return reply.choices[0].message.content or ""


def ask_streamed(client: OpenAI, model: str) -> Iterator[str]:
    """The same answer, piece by piece."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a server through the OpenAI client.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the server")
    url = parser.parse_args().url.rstrip("/").removesuffix("/v1")
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        raise SystemExit(f"no server answers at {url}; --url names another") from None
    print(f"{model}, whole:\n{ask(client, model)}\n\nstreamed:")
    for piece in ask_streamed(client, model):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
