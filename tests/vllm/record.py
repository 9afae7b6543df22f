"""Script that stores vLLM's answers to the chats: `python -m tests.vllm.record VLLM [FAMILY ...]`.

VLLM is the command `vllm` of an environment of its own, which needs the package num2words for SmolVLM. For each family,
the script starts `vllm launch render` on a small checkpoint, without weights or accelerator. With --check, it compares
the answers with the stored ones instead.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm import chats
from tests.vllm.checkpoints import write
from tests.vllm.stored import ANSWERS, CHATS, MEDIA, VIDEO_FAMILIES, essence, has_video, store, stored_chats
from tools.arguments import parser

PORT = 8191
URL = f"http://127.0.0.1:{PORT}"
START_TIMEOUT_S = 300.0


def asked(body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a body, or the status of a refusal."""
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions/render", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        return {"status": error.code}


@contextmanager
def rendering(vllm: str, family: str, dtype: str = "float32") -> Iterator[str]:
    """Run vLLM's render server on the checkpoint of a family, and yield its version."""
    options = ["--port", str(PORT), "--dtype", dtype, "--max-model-len", "4096", "--trust-request-mm-kwargs"]
    with tempfile.TemporaryDirectory() as folder:
        write(family, Path(folder, family))
        log = Path(folder, "log")
        with log.open("wb") as output:
            # The relative path is the model's name in the hashes.
            command = [vllm, "launch", "render", family, *options]
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _version(process, log)
        finally:
            process.terminate()
            process.wait()


def _version(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{URL}/version") as answer:
                return str(json.load(answer)["version"])
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def _store_chats() -> None:
    """Store the chats that are not stored yet.

    Other chats stay, because another version of a library may encode the same image otherwise.
    """
    MEDIA.mkdir(exist_ok=True)
    bodies = json.loads(CHATS.read_text()) if CHATS.exists() else {}
    for name, body in (*chats.image_chats(), *chats.pixel_chats(), *chats.video_chats()):
        if name not in bodies:
            bodies[name] = store(name, body)
    CHATS.write_text(json.dumps(bodies, indent=1) + "\n")


def _families_of(vllm: str) -> list[str]:
    """Return the families whose stored answers come from the version of vLLM, because others may not run in it."""
    shown = subprocess.run([vllm, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    stored = {path.stem: json.loads(path.read_text())["vllm"] for path in ANSWERS.glob("*.json")}
    return sorted(family for family, version in stored.items() if shown.partition("+")[0] == version)


def main() -> None:
    """Write the chats if they are not stored, and write or compare the answers of families."""
    arguments = parser(__doc__)
    arguments.add_argument("vllm", metavar="VLLM")
    arguments.add_argument("families", metavar="FAMILY", nargs="*")
    arguments.add_argument("--check", action="store_true", help="compare with the stored answers")
    given = arguments.parse_args()
    if shutil.which(given.vllm) is None:
        sys.exit(f"there is no command {given.vllm}; give the vllm of another environment: make test-vllm VLLM=PATH")
    sys.path.insert(0, str(Path(__file__).parents[1] / "stubs"))  # for the tests for families, as in pytest
    _store_chats()
    every, differing = stored_chats(), []
    for family in given.families or _families_of(given.vllm):
        path = ANSWERS / f"{family}.json"
        bodies = {name: body for name, body in every.items() if family in VIDEO_FAMILIES or not has_video(body)}
        with rendering(given.vllm, family) as version:
            answers = {
                name: essence(asked({"model": family, "mm_payload": "none", **body})) for name, body in bodies.items()
            }
        print(f"{family}: {len(answers)} answers of vLLM {version}", file=sys.stderr)
        if given.check:
            stored = json.loads(path.read_text())["answers"]
            differing += [f"{family}: {name}" for name in answers if answers[name] != stored.get(name)]
            continue
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in answers.items())
        path.write_text(f'{{"vllm": {json.dumps(version)}, "answers": {{\n{lines}\n}}}}\n')
    if differing:
        sys.exit("the answers of vLLM differ from the stored ones: " + ", ".join(differing))


if __name__ == "__main__":
    main()
