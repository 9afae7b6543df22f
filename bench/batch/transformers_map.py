"""Run transformers' processor in `datasets.map` or on Ray Data, and print the cost as JSON.

`bench.batch.maps` starts this file with the Python of an environment with torchvision, which does not contain this
project.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

# PyPI's torchvision needs a torch for CUDA, or its compiled library does not load. Its transforms are Python code over
# torch, which only need these operators to be declared.
for _operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from datasets import Dataset, disable_progress_bars  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402
from transformers.video_utils import load_video  # noqa: E402

WARM_UP = 4
"""Number of rows before the measurement of `datasets.map` starts."""
BATCH = 8
"""Number of rows of a batch on Ray. The first batch is not measured."""


def now() -> tuple[float, float]:
    """Return the wall time and the processor time of this process in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Processing:
    """The processor, called for one row."""

    def __init__(self, checkpoint: Path, backend: str) -> None:
        torch.set_num_threads(1)
        images = Qwen2VLImageProcessor if backend == "torchvision" else Qwen2VLImageProcessorPil
        self._processor = Qwen2VLProcessor(
            images.from_pretrained(checkpoint),
            AutoTokenizer.from_pretrained(checkpoint),
            Qwen2VLVideoProcessor.from_pretrained(checkpoint),
        )

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        media: dict[str, Any] = {}
        for item in json.loads(row["inputs"]):
            if "image" in item:
                parts.append({"type": "image"})
                with Image.open(item["image"]) as image:
                    media["images"] = [image.convert("RGB")]
            elif "video" in item:
                parts.append({"type": "video"})
                frames, metadata = load_video(item["video"], fps=2, backend="pyav")
                media |= {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": False}
            else:
                parts.append({"type": "text", "text": item["text"]})
        chat = [{"role": "user", "content": parts}]
        tokenizer = self._processor.tokenizer
        prompt = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, chat_template=tokenizer.chat_template
        )
        inputs = self._processor(text=[prompt], return_tensors="np", **media)
        # The token ids and masks have a row per prompt. The other arrays have none.
        return {name: array[0] if name.startswith(("input", "attention")) else array for name, array in inputs.items()}


def in_datasets(rows: list[dict[str, str]], given: argparse.Namespace) -> dict[str, Any]:
    """Run `datasets.map` after a warm-up. The arrays are written to an Arrow file."""
    disable_progress_bars()
    processing = Processing(given.checkpoint, given.backend)
    Dataset.from_list(rows[:WARM_UP]).map(processing, remove_columns="inputs", keep_in_memory=True)
    dataset = Dataset.from_list(rows)
    wall_s, cpu_s = now()
    mapped = dataset.map(
        processing, remove_columns="inputs", cache_file_name=str(given.out), writer_batch_size=16, num_proc=None
    )
    ended = now()
    return {
        "tokens": sum(map(len, mapped.select(range(WARM_UP))["input_ids"])),
        "wall_s": ended[0] - wall_s,
        "cpu_s": ended[1] - cpu_s,
        "bytes": given.out.stat().st_size,
        "peak_bytes": peak_bytes(),
    }


class Actor:
    """The function of an actor of Ray Data. It writes the arrays itself, because writing through Ray takes longer."""

    def __init__(self, checkpoint: Path, backend: str, out: Path) -> None:
        # Ray sends this class without the module, whose first lines must run before transformers is imported.
        self._processing = importlib.import_module("transformers_map").Processing(checkpoint, backend)
        self._out = out

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        tokens = []
        for number, inputs in zip(batch["number"], batch["inputs"], strict=True):
            arrays = self._processing({"inputs": inputs})
            for name, array in arrays.items():
                np.save(self._out / f"{number}-{name}.npy", array)
            tokens.append(len(arrays["input_ids"]))
        times = [np.full(len(tokens), value) for value in (*now(), peak_bytes())]
        return {"number": batch["number"], "tokens": np.array(tokens)} | dict(
            zip(("wall_s", "cpu_s", "peak_bytes"), times, strict=True)
        )


def on_ray(rows: list[dict[str, str]], given: argparse.Namespace) -> dict[str, Any]:
    """Run `map_batches` with one actor, and measure the actor from the end of its first batch."""
    import ray

    given.out.mkdir()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    items = [{"number": number} | row for number, row in enumerate(rows)]
    mapped = ray.data.from_items(items, override_num_blocks=max(1, len(rows) // 16)).map_batches(
        Actor,
        fn_constructor_args=(given.checkpoint, given.backend, given.out),
        batch_size=BATCH,
        num_cpus=1,
        concurrency=1,
    )
    done = sorted(mapped.iter_rows(), key=lambda row: float(row["wall_s"]))
    first, last = done[0], done[-1]
    measured = sum(row["wall_s"] > first["wall_s"] for row in done)
    return {
        "tokens": sum(int(row["tokens"]) for row in done if row["number"] < WARM_UP),
        "bytes": sum(file.stat().st_size for file in given.out.iterdir()),
        "peak_bytes": int(last["peak_bytes"]),
    } | {clock: float(last[clock] - first[clock]) * len(rows) / measured for clock in ("wall_s", "cpu_s")}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("checkpoint", type=Path)
    options.add_argument("rows", type=Path)
    options.add_argument("runner", choices=["datasets", "ray"])
    options.add_argument("backend", choices=["torchvision", "pil"])
    options.add_argument("out", type=Path, help="Arrow file of datasets.map, or folder of arrays on Ray")
    given = options.parse_args()
    lines = given.rows.read_text(encoding="utf-8").splitlines()
    rows = [{"inputs": json.dumps(json.loads(line)["inputs"])} for line in lines]
    print(json.dumps((in_datasets if given.runner == "datasets" else on_ray)(rows, given)))


if __name__ == "__main__":
    main()
