"""Script that stores digests of vLLM's tensors: `python -m tests.vllm.tensors VLLM [FAMILY ...]`.

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
from tests.vllm.stored import MEDIA, stored_chats
from tools.arguments import parser

STORED = Path(__file__).parent / "tensors.json"
FAMILIES = ("qwen2vl", "qwen2_5_vl", "qwen3_vl")
_WITH_VIDEOS = ("qwen2vl", "qwen2_5_vl")


def chats_of(family: str) -> dict[str, Any]:
    """Return the body of each chat whose tensors are stored for a family."""
    if family not in _WITH_VIDEOS:
        return stored_chats()
    url = "data:video/mp4;base64," + base64.b64encode((MEDIA / "short.mp4").read_bytes()).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {**stored_chats(), "video": {"messages": [{"role": "user", "content": content}]}}


def items_of(features: dict[str, Any] | None) -> list[Any]:
    """Return the tensors and the metadata of each item: dtype, shape, digest of the bytes, and field."""
    kept = (features or {}).get("kwargs_data") or {}, (features or {}).get("mm_metadata") or {}
    return [[_item(item) for items in data.values() for item in items] for data in kept]


def _item(item: str) -> dict[str, Any]:
    tensors = msgspec.msgpack.decode(base64.b64decode(item))
    found = {}
    for key, tensor in sorted(tensors.items()):
        dtype, shape, raw = tensor["data"]
        kind, options = tensor["field"]
        options.pop("slices", None)  # they depend on earlier requests, and are not read
        found[key] = [dtype, shape, blake3(raw.data).hexdigest(length=16), kind, options]
    return found


def main() -> None:
    """Write or compare the digests."""
    arguments = parser(__doc__)
    arguments.add_argument("vllm", metavar="VLLM")
    arguments.add_argument("families", metavar="FAMILY", nargs="*")
    arguments.add_argument("--check", action="store_true", help="compare with the stored digests")
    given = arguments.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "stubs"))  # for the tests for families, as in pytest
    stored, found = json.loads(STORED.read_text()) if STORED.exists() else {}, {}
    for family in given.families or FAMILIES:
        with rendering(given.vllm, family):
            answers = {name: asked({"model": family, **body}) for name, body in chats_of(family).items()}
        found[family] = {name: items_of(one["features"]) for name, one in answers.items() if "token_ids" in one}
    if given.check:
        chats = [(family, name) for family, own in found.items() for name in own]
        differing = [f"{family}: {name}" for family, name in chats if found[family][name] != stored[family][name]]
        sys.exit(", ".join(differing) or None)
    lines = (f"{json.dumps(family)}: {json.dumps(own)}" for family, own in (stored | found).items())
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
