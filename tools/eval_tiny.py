"""Judges the embedded checkpoint on held-out scenes: `python -m tools.eval_tiny`.

Prints the share of exact answers by task, writes it to `bench/results/tiny_eval.json`, and exits
with 1 where the total is under 95 %.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import Qwen2VLForConditionalGeneration

from tools.samples import TASKS, Sample, sample
from tools.scenes import HELD_OUT
from tools.tiny_inputs import encode, normalise
from tools.tiny_positions import use_papers_positions

SEED = 7_000_001
SCENES = 500
NEEDED = 0.95
ROOT = Path(__file__).parents[1]

Answerer = Callable[[Sequence[Image.Image], Sequence[Image.Image], str], str]
"""Pictures, the frames of a video (none for no video) and a question in; the answer out."""


def transformers_answerer(path: Path) -> Answerer:
    """Answers by transformers' own model, greedily, in float32 from the stored bfloat16."""
    use_papers_positions()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    model.eval()

    def answer(images: Sequence[Image.Image], frames: Sequence[Image.Image], question: str) -> str:
        asked = Sample("", tuple(images), tuple(frames), ((question, ""),))
        prompt = encode(tokenizer, asked, answered=False)
        ids = torch.tensor([prompt.ids])
        kinds = (ids == model.config.image_token_id).int()
        kinds += 2 * (ids == model.config.video_token_id).int()
        media: dict[str, torch.Tensor] = {}
        if prompt.image_patches:
            media["pixel_values"] = normalise(torch.cat(prompt.image_patches))
            media["image_grid_thw"] = torch.tensor(prompt.image_grids)
        if prompt.video_patches:
            media["pixel_values_videos"] = normalise(torch.cat(prompt.video_patches))
            media["video_grid_thw"] = torch.tensor(prompt.video_grids)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                max_new_tokens=64,
                do_sample=False,
                **media,
            )
        text: str = tokenizer.decode(out[0, len(prompt.ids) :].tolist(), skip_special_tokens=True)
        return text

    return answer


ENGINES: dict[str, Callable[[Path], Answerer]] = {"transformers": transformers_answerer}


def held_out(seed: int, number: int) -> list[Sample]:
    """`number` held-out samples, the tasks in turn."""
    rng = random.Random(seed)
    return [sample(rng, HELD_OUT, TASKS[i % len(TASKS)]) for i in range(number)]


def judge(answer: Answerer, samples: Sequence[Sample], *, verbose: bool) -> dict[str, list[int]]:
    """Right answers and questions of each task: `{task: [right, asked]}`."""
    right, asked = Counter[str](), Counter[str]()
    for one in samples:
        for question, wanted in one.turns:
            said = answer(one.images, one.frames, question)
            asked[one.task] += 1
            right[one.task] += said == wanted
            if verbose and said != wanted:
                sizes = [picture.size for picture in (*one.images, *one.frames[:1])]
                print(f"{one.task} {sizes}: {question!r}: {said!r}, wanted {wanted!r}")
    return {task: [right[task], asked[task]] for task in TASKS}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=ROOT / "mindie_mm" / "assets" / "tiny")
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--scenes", type=int, default=SCENES)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "tiny_eval.json")
    parser.add_argument("--verbose", action="store_true", help="print every wrong answer")
    args = parser.parse_args()
    found = judge(ENGINES[args.engine](args.path), held_out(args.seed, args.scenes), verbose=args.verbose)
    right, asked = (sum(column) for column in zip(*found.values(), strict=True))
    for task, (good, number) in {**found, "total": (right, asked)}.items():
        print(f"{task:10} {good:4} of {number:4}  {good / number:7.1%}")
    report = {
        "engine": args.engine,
        "seed": args.seed,
        "scenes": args.scenes,
        "needed": NEEDED,
        "accuracy": round(right / asked, 4),
        "tasks": {
            task: {"right": good, "asked": number, "accuracy": round(good / number, 4)}
            for task, (good, number) in found.items()
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if right / asked >= NEEDED else 1


if __name__ == "__main__":
    sys.exit(main())
