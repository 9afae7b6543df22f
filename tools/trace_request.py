"""Trace an image question of four tokens through one process: `python -m tools.trace_request`.

The tokenizer, the engine and the detokenizer run in this process, on the embedded checkpoint, after a question about
another image has warmed them up. The output lists the project's files in the order in which the question enters them,
the functions that it enters in each, and the number of calls. Comprehensions count as parts of their functions.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Self

from PIL import Image

from mindie_mm.engine.base import BaseEngine
from mindie_mm.engine.process.engine_process import load_engine
from mindie_mm.engine.ranks import ALONE
from mindie_mm.engine.requests.engine_messages import Add, Start
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.text.detokenizer import Detokenizer, load_tokenizer
from tools.arguments import parser

ROOT = Path(__file__).parents[1]
NUM_TOKENS = 4


class Trace:
    """A counter of calls to the project's functions, in this thread and in threads that start while it runs."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls by file and function, in the order of the first call."""
        self._names: dict[CodeType, tuple[str, str] | None] = {}

    def __enter__(self) -> Self:
        threading.setprofile(self._count)
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := self._name(frame.f_code)) is not None:
            self.calls[name] += 1

    def _name(self, code: CodeType) -> tuple[str, str] | None:
        if code not in self._names:
            path = Path(code.co_filename)
            own = path.is_relative_to(ROOT / "mindie_mm") and not code.co_name.endswith(("comp>", "<genexpr>"))
            self._names[code] = (str(path.relative_to(ROOT)), code.co_qualname) if own else None
        return self._names[code]


def ask(tokenizer: Tokenizer, engine: BaseEngine, detokenizer: Detokenizer, colour: str) -> str:
    """Ask about an image of the given color, and return the answer's text."""
    image = Image.new("RGB", (224, 224), colour)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        path_file = Path(folder) / "shm_name.txt"
        ids = tokenizer.tokenize([{"image": image}, {"text": "What colour is it?"}], path_file)
        try:
            refused = engine.add(Add(colour, ids.numpy().tobytes(), params))
            if refused is not None and refused.error is not None:
                raise refused.error.exception()
            text = ""
            while engine.has_work():
                for progress in engine.step().progress:
                    text += detokenizer.push(progress.token_ids)
            return text + detokenizer.flush()
        finally:
            release(path_file)


def show(trace: Trace) -> None:
    """Print the functions of each file, and the counts."""
    files: dict[str, list[str]] = {}
    for (file, function), calls in trace.calls.items():
        files.setdefault(file, []).append(f"{function} ({calls})")
    for file, functions in files.items():
        print(f"{file}: {', '.join(functions)}")
    print(f"{len(files)} files, {len(trace.calls)} functions, {trace.calls.total()} calls")


def main() -> None:
    """Print the trace and its counts."""
    checkpoint = Checkpoint.open(None)
    engine, _ = load_engine(Start(None, EngineConfig(device="cpu", prefix_caching=False)), ALONE)
    texts = load_tokenizer(checkpoint)
    with Tokenizer.from_pretrained(None) as tokenizer:
        ask(tokenizer, engine, Detokenizer(texts), "blue")
        trace = Trace()
        with trace:
            ask(tokenizer, engine, Detokenizer(texts), "red")
    show(trace)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
