"""Script that stores digests of vLLM's tensors: `python -m tests.vllm.tensors VLLM [SERVER ...]`.

VLLM is the command `vllm` of an environment of its own. The script starts `vllm launch render` for each family, as
`tests.vllm.record` does. With --check, it compares the tensors with the stored ones instead.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from tests.vllm.record import asked, rendering
from tests.vllm.stored import MEDIA, has_video, stored_chats
from tools.arguments import parser

STORED = Path(__file__).parent / "tensors.json"
PATCHES = ("qwen2vl", "qwen2_5_vl", "qwen3_vl")
TILES = ("internvl", "llava", "llava_next", "llava_onevision", "gemma3", "idefics3", "smolvlm")
FAMILIES = (*PATCHES, *TILES)
"""Families whose tensors are stored. Those in `PATCHES` also have tensors of videos."""
SERVERS = {family: (family, "float32") for family in FAMILIES} | {"llava auto": ("llava", "auto")}
"""Family and --dtype of each server of vLLM whose tensors are stored."""


def chats_of(family: str) -> dict[str, Any]:
    """Return the body of each chat whose tensors are stored for a family."""
    chats = stored_chats()
    if family not in PATCHES:
        return {name: body for name, body in chats.items() if not has_video(body)}
    url = "data:video/mp4;base64," + base64.b64encode((MEDIA / "short.mp4").read_bytes()).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {**chats, "video": {"messages": [{"role": "user", "content": content}]}}


def items_of(features: dict[str, Any] | None) -> list[Any]:
    """Return the tensors and the metadata of each item: dtype, shape, digest of the bytes, and field."""
    kept = (features or {}).get("kwargs_data") or {}, (features or {}).get("mm_metadata") or {}
    return [[_item(item) for _, items in sorted(data.items()) for item in items] for data in kept]


def _item(item: str) -> dict[str, Any]:
    tensors = msgspec.msgpack.decode(base64.b64decode(item))
    found = {}
    for key, tensor in sorted(tensors.items()):
        kind, options = tensor["field"]
        for name in ("slices", "batch_size"):  # they depend on earlier requests, and are not read
            options.pop(name, None)
        found[key] = [*_data(tensor["data"]), kind, options]
    return found


def _data(data: list[Any]) -> list[Any]:
    """Return the dtype, shape and digest of a tensor, or the text of times, of which vLLM reads only the tenths."""
    if all(isinstance(number, float) for number in data):
        return [f"{time:.1f}" for time in data]
    dtype, shape, raw = data
    return [dtype, shape, blake3(raw.data).hexdigest(length=16)]


def main() -> None:
    """Write or compare the digests."""
    arguments = parser(__doc__)
    arguments.add_argument("vllm", metavar="VLLM")
    arguments.add_argument("servers", metavar="SERVER", nargs="*", help=f"one of {', '.join(SERVERS)}")
    arguments.add_argument("--check", action="store_true", help="compare with the stored digests")
    given = arguments.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "stubs"))  # for the tests for families, as in pytest
    stored, found = json.loads(STORED.read_text()) if STORED.exists() else {}, {}
    for server in given.servers or SERVERS:
        family, dtype = SERVERS[server]
        with rendering(given.vllm, family, dtype):
            answers = {name: asked({"model": family, **body}) for name, body in chats_of(family).items()}
        found[server] = {name: items_of(one["features"]) for name, one in answers.items() if "token_ids" in one}
    if given.check:
        chats = [(server, name) for server, own in found.items() for name in own]
        differing = [f"{server}: {name}" for server, name in chats if found[server][name] != stored[server].get(name)]
        sys.exit(", ".join(differing) or None)
    lines = (f"{json.dumps(server)}: {json.dumps(own)}" for server, own in (stored | found).items())
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
