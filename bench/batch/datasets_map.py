"""Run `datasets.map` with transformers' processor, in an environment with torchvision, and print its cost as JSON.

`bench.batch.maps` starts this file with the Python of that environment, which does not contain this project.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

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
"""Number of rows before the measurement starts."""


def now() -> tuple[float, float]:
    """Return the wall time and the processor time of this process in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("checkpoint", type=Path)
    options.add_argument("rows", type=Path)
    options.add_argument("backend", choices=["torchvision", "pil"])
    options.add_argument("out", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    images = Qwen2VLImageProcessor if given.backend == "torchvision" else Qwen2VLImageProcessorPil
    processor = Qwen2VLProcessor(
        images.from_pretrained(given.checkpoint),
        AutoTokenizer.from_pretrained(given.checkpoint),
        Qwen2VLVideoProcessor.from_pretrained(given.checkpoint),
    )

    def processed(row: dict[str, Any]) -> dict[str, Any]:
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
        prompt = processor.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, chat_template=processor.tokenizer.chat_template
        )
        inputs = processor(text=[prompt], return_tensors="np", **media)
        # The token ids and masks have a row per prompt. The other arrays have none.
        return {name: array[0] if name.startswith(("input", "attention")) else array for name, array in inputs.items()}

    lines = given.rows.read_text(encoding="utf-8").splitlines()
    rows = [{"inputs": json.dumps(json.loads(line)["inputs"])} for line in lines]
    Dataset.from_list(rows[:WARM_UP]).map(processed, remove_columns="inputs", keep_in_memory=True)
    dataset = Dataset.from_list(rows)
    wall_s, cpu_s = now()
    mapped = dataset.map(
        processed, remove_columns="inputs", cache_file_name=str(given.out), writer_batch_size=16, num_proc=None
    )
    ended = now()
    print(
        json.dumps(
            {
                "rows": len(mapped),
                "tokens": sum(map(len, mapped.select(range(WARM_UP))["input_ids"])),
                "wall_s": ended[0] - wall_s,
                "cpu_s": ended[1] - cpu_s,
                "bytes": given.out.stat().st_size,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
