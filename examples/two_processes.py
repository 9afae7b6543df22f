"""Tokenize media in one process, and generate in another process, to which only token ids are sent.

python examples/two_processes.py                     # the embedded model
python examples/two_processes.py qwen2-vl mindie     # a checkpoint folder, and MindIE's wire format
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw

from mindie_mm import LLM, SamplingParams, Tokenizer
from mindie_mm.shm import release


def circle(x: int) -> Image.Image:
    """Draw a red circle at the column `x`."""
    image = Image.new("RGB", (160, 128), (250, 250, 250))
    ImageDraw.Draw(image).ellipse((x - 32, 32, x + 32, 96), (220, 40, 40))
    return image


QUESTIONS = [
    [{"image": circle(80)}, {"text": "What is in the image?"}],
    [{"video": [circle(x) for x in range(32, 112, 10)], "sample_fps": 4}, {"text": "Which way does the shape move?"}],
    [
        {"audio": np.sin(np.arange(16_000) * 2600 * 2 * np.pi / 16_000, dtype=np.float32), "sampling_rate": 16_000},
        {"text": "Is the tone high, middle or low?"},
    ],
]


def generate(model: str | None, connection: Connection) -> None:
    """Run process B, which receives ids and sends back texts. It never sees a file or a pixel of the media."""
    with LLM(model) as llm:
        outputs = llm.generate(connection.recv(), SamplingParams(temperature=0, max_tokens=16))
    connection.send([output.text for output in outputs])


def main(model: str | None = None, wire: str = "native") -> list[str]:
    """Run process A, which tokenizes the questions and frees their media at the end."""
    processes = multiprocessing.get_context("forkserver")
    ours, theirs = processes.Pipe()
    other = processes.Process(target=generate, args=(model, theirs))
    other.start()
    theirs.close()  # so that `recv` raises EOFError if process B dies
    # The example for MindIE's wire uses Qwen2-VL, which has no audio.
    questions = QUESTIONS if wire == "native" else QUESTIONS[:2]
    with TemporaryDirectory() as folder, Tokenizer.from_pretrained(model, wire) as tokenizer:
        path_file = Path(folder, "shm_name.txt")
        chats = [[{"role": "user", "content": content}] for content in questions]
        try:
            ours.send([tokenizer.tokenize_chat(chat, path_file).numpy() for chat in chats])
            texts: list[str] = ours.recv()
        finally:
            release(path_file)
    other.join()
    return texts


if __name__ == "__main__":
    print(*main(*sys.argv[1:]), sep="\n")
