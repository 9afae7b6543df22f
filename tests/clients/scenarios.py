"""Values and functions that the scripts of all clients share.

Each script runs in its client's own environment and gets the service's URL and a folder of media as arguments. It
has one function without arguments per scenario. Only the standard library may be imported here.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Only outcomes are written to standard output. The output of clients is redirected to standard error.
OUTCOMES = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

URL, MEDIA = sys.argv[1:3]
BASE_URL = f"{URL}/v1"
MODEL = "tiny"
KEY = "none"
IMAGE_FILE = Path(MEDIA, "red_square.png")
IMAGE = "data:image/png;base64," + base64.b64encode(IMAGE_FILE.read_bytes()).decode()
PDF_FILE = Path(MEDIA, "red_square.pdf")
PDF = base64.b64encode(PDF_FILE.read_bytes()).decode()
AUDIO_FILE = Path(MEDIA, "three_beeps.wav")
AUDIO = base64.b64encode(AUDIO_FILE.read_bytes()).decode()

HELLO = "Hello!"
HELLO_BACK = "Hello! Show me a picture of a shape and ask me about it."
"""The embedded checkpoint's answer to `HELLO`."""
WHAT = "What is in the image?"
RED_SQUARE = "red square"
"""The embedded checkpoint's answer to `WHAT` about the image, which is also the PDF's only page."""
HOW_MANY = "How many beeps do you hear?"
THREE = "3"
"""The embedded checkpoint's answer to `HOW_MANY` about the audio."""
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
}


def check_weather(arguments: Any) -> None:
    """Check the arguments of a call to the weather tool, parsed or as JSON."""
    values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    assert values.keys() == {"city", "days"}, values
    assert values["city"] in {"Oslo", "Rome"}, values
    assert values["days"] in {1, 2, 3}, values


def report(scenarios: Mapping[str, Callable[[], Any]]) -> None:
    """Run the public functions of a script, and write a line of JSON with the name and the error of each."""
    with asyncio.Runner() as runner:
        for name, scenario in [*scenarios.items()]:  # dspy adds names while it runs
            if name.startswith("_") or not inspect.isfunction(scenario) or scenario.__module__ != "__main__":
                continue
            error = None
            try:
                result = scenario()
                if inspect.iscoroutine(result):
                    runner.run(result)
            except Exception:  # noqa: BLE001 - whatever the client raises is the outcome
                error = traceback.format_exc()
            print(json.dumps({"scenario": name, "error": error}), file=OUTCOMES, flush=True)
