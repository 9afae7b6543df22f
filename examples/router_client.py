"""A client that sends each chat to the server that probably holds its beginning: `router_client.py RENDER SERVER...`.

It asks two questions about each of several images. RENDER is the URL of `mindie-mm render`, and each SERVER that of a
server with an OpenAI API. The client prints the server, the number of prompt tokens that this server has seen before,
and the answer. It needs only Python.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import urllib.request
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

BLOCK_TOKENS = 16
"""Number of tokens of a KV block in vLLM."""
COLORS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 60, 200)}
QUESTIONS = ("What color is the image?", "Is the image dark?")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON and return the answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - a server of the operator
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        found: dict[str, Any] = json.load(answer)
    return found


def blocks(rendered: dict[str, Any]) -> Iterator[bytes]:
    """Yield a key for each whole block of a prompt. It depends on all tokens and media up to the end of the block."""
    features = rendered["features"] or {"mm_placeholders": {}, "mm_hashes": {}}
    starts = {
        place["offset"]: own.encode()
        for kind, places in features["mm_placeholders"].items()
        for place, own in zip(places, features["mm_hashes"][kind], strict=True)
    }
    digest, ids = blake2b(digest_size=16), rendered["token_ids"]
    for stop in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        for index in range(stop - BLOCK_TOKENS, stop):
            digest.update(struct.pack("<q", ids[index]) + starts.get(index, b""))
        yield digest.digest()


class Router:
    """What each server has probably cached, because it was sent there."""

    def __init__(self, servers: list[str]) -> None:
        self._blocks: dict[str, set[bytes]] = {server: set() for server in servers}

    def choose(self, rendered: dict[str, Any]) -> tuple[str, int]:
        """Return the server that holds most of a prompt, or else the one with the least blocks, and what it holds."""
        keys = [*blocks(rendered)]
        held = {server: sum(key in own for key in keys) for server, own in self._blocks.items()}
        server = min(held, key=lambda one: (-held[one], len(self._blocks[one])))
        self._blocks[server].update(keys)
        return server, held[server] * BLOCK_TOKENS


def image(color: tuple[int, int, int], side: int = 448) -> str:
    """Return a square of one color as the data: URL of a PNG file."""
    rows = (b"\0" + bytes(color) * side) * side

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def main(render: str, *servers: str) -> None:
    """Ask the questions about all images."""
    router = Router([*servers])
    for question in QUESTIONS:
        for name, color in COLORS.items():
            content = [{"type": "image_url", "image_url": {"url": image(color)}}, {"type": "text", "text": question}]
            chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
            rendered = post(f"{render}/v1/chat/completions/render", {**chat, "mm_payload": "none"})
            server, held = router.choose(rendered)
            answer = post(f"{server}/v1/chat/completions", chat)["choices"][0]["message"]["content"]
            print(f"{name}: {server} held {held} of {len(rendered['token_ids'])} tokens: {answer}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
