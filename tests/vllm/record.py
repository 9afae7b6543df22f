"""Script that stores vLLM's answers to the chats: `python -m tests.vllm.record URL FAMILY`.

URL is that of `vllm launch render FAMILY --trust-request-mm-kwargs`, run in the folder that contains the family's
checkpoint FAMILY.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from tests.vllm import chats
from tests.vllm.stored import ANSWERS, CHATS, MEDIA, essence, store, stored_chats
from tools.arguments import parser


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a body, or the status of a refusal."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions/render", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        return {"status": error.code}


def main() -> None:
    """Write the chats if they are not stored, and the answers of a family."""
    arguments = parser(__doc__)
    arguments.add_argument("url", metavar="URL")
    arguments.add_argument("family", metavar="FAMILY")
    given = arguments.parse_args()
    if not CHATS.exists():
        MEDIA.mkdir(exist_ok=True)
        bodies = {name: store(name, body) for name, body in (*chats.image_chats(), *chats.pixel_chats())}
        CHATS.write_text(json.dumps(bodies, indent=1) + "\n")
    with urllib.request.urlopen(f"{given.url}/version") as answer:
        version = json.load(answer)["version"]
    answers = {
        name: essence(asked(given.url, {"model": given.family, "mm_payload": "none", **body}))
        for name, body in stored_chats().items()
    }
    ANSWERS.mkdir(exist_ok=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in answers.items())
    path = ANSWERS / f"{given.family}.json"
    path.write_text(f'{{"vllm": {json.dumps(version)}, "answers": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
