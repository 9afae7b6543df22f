"""Items that run an attacker's code in the locked-in decoder that reads them.

The code of the decoders changes after they are locked in. Everything else is the service's or the pool's own code.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HOOK = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mindie_mm.decode.decoder":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), compromise(module))
        return spec

def compromise(module):
    answer, code = module.Decoder.answer, [b""]
    def compromised(self, message, descriptors):
        if message.item is not None:
            code[0] = os.pread(descriptors[0], 1 << 20, 0).partition(b"PYTHON ")[2]
        def go_on():
            return answer(self, message, descriptors)
        if not code[0]:
            return go_on()
        names = {"module": module, "message": message, "descriptors": descriptors, "go_on": go_on}
        exec(code[0], names)
        return names["attack"]()
    module.Decoder.answer = compromised

sys.meta_path.insert(0, Finder())
"""
_SAYING = """
import msgspec

def say(text):
    "Return a reply that shows the client a text."
    error = module.DecoderFailure("MediaError", f"said: {text}")
    return module.Refused(error)

def raw(message):
    "Return a reply with any bytes."
    return msgspec.Raw(message)
"""


def environment(folder: Path) -> dict[str, str]:
    """Write the hook to `folder`, and return variables for processes whose decoders run the code of items."""
    (folder / "sitecustomize.py").write_text(_HOOK, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def running(image: bytes, attack: Callable[[], Any] | str) -> bytes:
    """Return an encoded image that runs a function named `attack` in the decoder that reads the image.

    `attack` is the function or its source. The decoder calls the function for each message about the item, and sends
    the reply that the function returns. The function can use these names:

    - `message` is the message, `descriptors` are its open files, and `module` is mindie_mm.decode.decoder.
    - `go_on()` returns the reply of a decoder that is not compromised.
    - `say(text)` returns a reply that shows `text` to the client.
    - `raw(message)` returns a reply with the bytes `message`.
    """
    source = attack if isinstance(attack, str) else inspect.getsource(attack)
    return image + b"PYTHON " + (_SAYING + source).encode()
