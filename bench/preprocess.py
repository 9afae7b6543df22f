"""Benchmark of preprocessing one JPEG to a published block on one core.

It is compared with both backends of transformers, and with decoding and resizing alone. The torchvision backend of
transformers runs on tests/stubs, which resizes with the same function as torchvision. Its pixels come from
libjpeg-turbo, as in torchvision's own decoder. The variants run alternately in random order, each a few times in a row.
The results are medians.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import simplejpeg
import torch
from PIL import Image

from bench.report import median, plot, write
from mindie_mm.decode.digest import content_digest
from mindie_mm.inputs import Media
from mindie_mm.media.image.encoded_image import resize
from mindie_mm.models._qwen_pixels import smart_resize
from mindie_mm.models.qwen2_vl import Qwen2VLProcessor
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.shm import Arena, release
from mindie_mm.tokenize.stores import Preprocessed
from tests.media_samples import encoded, photograph
from tests.transformers_reference import Qwen2VLImageProcessor, Qwen2VLImageProcessorPil, load_image
from tools.arguments import parser

SIZES = ((640, 480), (1420, 720), (1920, 1080), (4000, 3000))
"""Widths and heights of the JPEGs, which have quality 90."""
MAX_PIXELS = 12_845_056
"""Limit of the published checkpoints. At these sizes, images are only resized to multiples of 28."""
ROUNDS = {(640, 480): 10, (1420, 720): 7, (1920, 1080): 5, (4000, 3000): 2}
RUN = 4
"""Number of consecutive runs per turn. A tokenizer process also repeats the same work."""
ARENA_BYTES = 128 * 2**20
OURS, AGAIN = "ours", "ours, of an image that came before"
DECODE_AND_RESIZE, TORCHVISION, PIL = "decode + resize alone", "torchvision", "PIL"


def contestants(data: bytes, arena: Arena, path_file: Path) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name. Each of them starts from the bytes of the JPEG."""
    limits = {"min_pixels": 56 * 56, "max_pixels": MAX_PIXELS}
    torchvision, pil = Qwen2VLImageProcessor(**limits), Qwen2VLImageProcessorPil(**limits)
    processor = Qwen2VLProcessor(Checkpoint.open(path_file.parent))
    settings = processor.image

    def ours(preprocessed: Preprocessed) -> object:
        plan, write = processor.plan(Media("image", data), data, {"image": 1})
        digest = content_digest(plan.settings, data)
        with arena.allocate(plan.specs, path_file=path_file) as block:
            if not preprocessed.copy(digest, block):
                write(block)
                preprocessed.keep(digest, block)
            return block.publish(digest)

    def decode_and_resize() -> object:
        rgb = simplejpeg.decode_jpeg(data, "RGB")
        return resize(rgb, *smart_resize(*rgb.shape[:2], settings))

    def by_torchvision() -> object:
        rgb = torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB")).permute(2, 0, 1)
        return torchvision(images=[rgb], return_tensors="pt")["pixel_values"]

    def by_pil() -> object:
        return pil(images=[load_image(Image.open(io.BytesIO(data)))], return_tensors="pt")["pixel_values"]

    again = partial(ours, Preprocessed(ARENA_BYTES))
    return {
        OURS: partial(ours, Preprocessed()),
        AGAIN: again,
        DECODE_AND_RESIZE: decode_and_resize,
        TORCHVISION: by_torchvision,
        PIL: by_pil,
    }


def measure(size: tuple[int, int], arena: Arena, path_file: Path) -> dict[str, float]:
    """Return each function's median CPU time in milliseconds. CPU time depends little on other load."""
    entries = contestants(encoded(photograph("coffee.png", size), quality=90), arena, path_file)
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    order = random.Random(0)
    for turn in range(ROUNDS[size] + 1):
        for name in order.sample(list(entries), len(entries)):
            for _ in range(RUN):
                start = time.process_time()
                entries[name]()
                if turn:  # the first turn is a warm-up
                    seconds[name].append(time.process_time() - start)
                release(path_file)
                path_file.unlink(missing_ok=True)
    return {name: 1e3 * median(values) for name, values in seconds.items()}


def main() -> None:
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"max_pixels": MAX_PIXELS, "jpeg_quality": 90, "sizes": {}}
    with tempfile.TemporaryDirectory() as folder, Arena.create(ARENA_BYTES) as arena:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}), encoding="utf-8")
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps({"max_pixels": MAX_PIXELS}), encoding="utf-8")
        arena.populated.wait()
        for size in SIZES:
            ms = measure(size, arena, Path(folder) / "shm_name.txt")
            figures["sizes"]["{}x{}".format(*size)] = {
                "milliseconds": {name: round(value, 2) for name, value in ms.items()},
                "times_faster_than_PIL": round(ms[PIL] / ms[OURS], 2),
                "times_faster_than_torchvision": round(ms[TORCHVISION] / ms[OURS], 2),
                "over_decode_and_resize": round(ms[OURS] / ms[DECODE_AND_RESIZE] - 1, 3),
            }
    write("preprocess", figures)
    plot("preprocess", lambda axes: draw(axes, figures["sizes"]))


def draw(axes: Any, sizes: dict[str, Any]) -> None:
    """Plot milliseconds as bars on a logarithmic axis, with a group per size."""
    names = [AGAIN, DECODE_AND_RESIZE, OURS, TORCHVISION, PIL]
    for place, name in enumerate(names):
        values = [figures["milliseconds"][name] for figures in sizes.values()]
        bars = axes.bar([index + 0.17 * (place - 2) for index in range(len(values))], values, 0.16, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(sizes)), list(sizes))
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds of processor time, one core")
    axes.set_title("One JPEG to a published block in shared memory")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
