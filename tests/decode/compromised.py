"""Decoder processes that run an attacker's code, as if a media item had compromised them.

The code of the decoders changes after they are locked in. The pool in the test process is the one of the service.
"""

from __future__ import annotations

from pathlib import Path

HOOK = '''
"""Replace the code of decoders. The bytes after an image say what an item does."""

import importlib.abc
import importlib.util
import os
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mindie_mm.decode.decoder":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            compromise(module)

        spec.loader.exec_module = exec_module
        return spec


def compromise(module):
    answer, receive = module.Decoder.answer, module.ReceivingChannel.receive
    state = {"orders": b""}

    def compromised(self, message, descriptors):
        if message.item is not None:
            data = os.pread(descriptors[0], 1 << 20, 0)
            state["orders"] = data.partition(b"ORDERS ")[2]
        if state["orders"] == b"spin":
            while True:
                pass
        if state["orders"] == b"write nothing" and not isinstance(message, module.PlanItem):
            return module.Written()
        return answer(self, message, descriptors)

    def received(self):
        while state["orders"] == b"spin later":
            pass
        return receive(self)

    module.Decoder.answer = compromised
    module.ReceivingChannel.receive = received


sys.meta_path.insert(0, Finder())
'''


def write_hook(folder: Path) -> None:
    """Write the code to `folder`. Processes that have the folder in PYTHONPATH compromise their decoders."""
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")


def ordering(image: bytes, orders: str) -> bytes:
    """Return an encoded image that gives `orders` to the decoder that reads it."""
    return image + b"ORDERS " + orders.encode()
