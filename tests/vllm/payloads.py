"""Script that stores vLLM's payloads and answers to them: `python -m tests.vllm.payloads VLLM [FAMILY ...]`.

VLLM is the command `vllm` of an environment of its own. The script starts `vllm serve --enable-scale-out` on a small
checkpoint of each family, on the CPU. With --check, it compares the payloads and answers with the stored ones instead,
and requires that vLLM's answers to the payloads of `mindie-mm render` equal those to its own.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.vllm.checkpoints import write
from tools.arguments import parser
from tools.demo import data_url, draw_shape
from tools.serving import running_service

FAMILY = "qwen2vl"
OTHERS = ("internvl", "llava_next")
_FOLDER = Path(__file__).parent / "payloads"
RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"
_PORT = 8192
_OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--enable-scale-out")
_START_TIMEOUT_S = 600.0
_TOLERANCE = 1e-4


def stored(family: str = FAMILY) -> dict[str, Any]:
    """Return the stored chats by name, each with vLLM's payload and vLLM's answer to the payload."""
    with gzip.open(_FOLDER / f"{family}.json.gz", "rt") as file:
        chats: dict[str, Any] = json.load(file)["chats"]
    return chats


def tensors(payload: dict[str, Any], part: str = "kwargs_data") -> list[dict[str, Any]]:
    """Return the decoded items of a payload with images. `part` is kwargs_data or mm_metadata."""
    items = [msgspec.msgpack.decode(base64.b64decode(one)) for one in payload["features"][part]["image"]]
    for item in items:
        if {"image_sizes", "pixel_values"} <= item.keys():
            item["pixel_values"]["data"] = _without_padding(*item["pixel_values"]["data"])
    for element in (element for item in items for element in item.values()):
        for name in ("slices", "batch_size"):  # they depend on earlier requests, and are not read
            element["field"][1].pop(name, None)
    return items


def _without_padding(dtype: str, shape: list[int], raw: msgspec.msgpack.Ext) -> list[Any]:
    """Return the data of tiles without the tiles of zeros that vLLM adds if another image of its prompt has more."""
    tiles = np.frombuffer(raw.data, dtype).reshape(shape)
    (places,) = np.nonzero(tiles.any(axis=(1, 2, 3)))
    tiles = tiles[: places[-1] + 1]
    return [dtype, [*tiles.shape], msgspec.msgpack.Ext(raw.code, tiles.tobytes())]


def answerable(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a payload whose ranges contain only placeholders, because vLLM's engine ends with other ids in them."""
    ids = payload["token_ids"]
    ranges = []
    for place in payload["features"]["mm_placeholders"]["image"]:
        offset, length = place["offset"], place["length"]
        token = ids[offset + length // 2]
        places = [at for at in range(offset, offset + length) if ids[at] == token]
        ranges.append({"offset": places[0], "length": len(places)})
    return payload | {"features": payload["features"] | {"mm_placeholders": {"image": ranges}}}


def scores(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the tokens of a choice and their log-probabilities."""
    return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]


def asked(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def chats(family: str) -> dict[str, dict[str, Any]]:
    """Return the chats to store."""
    red, blue = draw_shape("red", (220, 40, 40), "square", x=0.4), draw_shape("blue", (40, 60, 220), "circle", x=0.5)
    prompts = {"one": [red.resize((64, 48))], "two": [blue.resize((70, 60)), red.resize((120, 50))]}
    settings = {"model": family, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    found = {}
    for name, images in prompts.items():
        parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        content = [*parts, {"type": "text", "text": "What is it?"}]
        found[name] = {"messages": [{"role": "user", "content": content}], **settings}
    return found


@contextmanager
def vllm_server(vllm: str, folder: str, family: str) -> Iterator[str]:
    """Run vLLM with an engine on the checkpoint of a family in `folder`, and yield its URL."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [vllm, "serve", family, "--port", str(_PORT), *_OPTIONS]
    process = subprocess.Popen(command, cwd=folder, env=environment)
    url, deadline = f"http://127.0.0.1:{_PORT}", time.monotonic() + _START_TIMEOUT_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("vLLM did not start") from None
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def differences(url: str, folder: Path, family: str) -> Iterator[str]:
    """Yield how vLLM's answers differ from the stored ones, and from those to the payloads of `mindie-mm render`."""
    given = {"model_id": family, "served_model_name": family, "max_model_len": 1024, "generation_config": "vllm"}
    given |= {"dtype": "float32", "spool": str(folder / "spool")}
    with running_service(given, folder / "log", folder / family, command="render") as running:
        for name, chat in stored(family).items():
            theirs, ours = (asked(one, RENDER, chat["chat"]) for one in (url, running.url))
            for what, payload in (("vLLM", answerable(theirs)), ("mindie-mm render", ours)):
                if tensors(payload) != tensors(chat["render"]):
                    yield f"{family}, {name}: other tensors from {what}"
                tokens, logprobs = scores(asked(url, GENERATE, payload)["choices"][0])
                stored_tokens, stored_logprobs = scores(chat["answer"]["choices"][0])
                apart = max(abs(one - other) for one, other in zip(logprobs, stored_logprobs, strict=True))
                if tokens != stored_tokens or apart > _TOLERANCE:
                    yield f"{family}, {name}: another answer to the payload of {what}"


def store(url: str, family: str) -> None:
    """Store vLLM's payloads, and its answers to them."""
    version = json.load(urllib.request.urlopen(f"{url}/version"))["version"]
    made = {}
    for name, chat in chats(family).items():
        rendered = asked(url, RENDER, chat)
        made[name] = {"chat": chat, "render": rendered, "answer": asked(url, GENERATE, answerable(rendered))}
    text = json.dumps({"vllm": version, "chats": made})
    (_FOLDER / f"{family}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    """Write or compare the payloads and answers."""
    arguments = parser(__doc__)
    arguments.add_argument("vllm", metavar="VLLM")
    arguments.add_argument("families", metavar="FAMILY", nargs="*")
    arguments.add_argument("--check", action="store_true", help="compare with the stored ones")
    given = arguments.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "stubs"))  # for the tests for families, as in pytest
    found: list[str] = []
    for family in given.families or (FAMILY, *OTHERS):
        with tempfile.TemporaryDirectory() as folder:
            write(family, Path(folder, family), is_run=True)
            with vllm_server(given.vllm, folder, family) as url:
                if given.check:
                    found += differences(url, Path(folder), family)
                else:
                    store(url, family)
    sys.exit("; ".join(found) or None)


if __name__ == "__main__":
    main()
