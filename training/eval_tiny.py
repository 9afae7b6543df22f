"""Evaluate the embedded checkpoint on held-out scenes and sounds through `LLM`: `python -m training.eval_tiny`.

The script prints the share of exact answers per task, and writes the shares to `bench/results/tiny_eval.json`. The exit
status is 1 if a share is below `NEEDED`. The spoken digits need espeak-ng (`apt-get install espeak-ng`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindie_mm import LLM, SamplingParams
from training.samples import TASKS, Sample, sample
from training.scenes import HELD_OUT
from training.sounds import make

SEED = 7_000_001
SAMPLES = 1000
NEEDED = 0.85
ROOT = Path(__file__).parents[1]


def held_out(seed: int, number: int) -> list[Sample]:
    """Return `number` held-out samples. The tasks alternate."""
    rng = random.Random(seed)
    return [sample(rng, HELD_OUT, TASKS[i % len(TASKS)]) for i in range(number)]


def as_input(one: Sample) -> list[dict[str, Any]]:
    """Return the sample's media, then its question, as input for `LLM.generate`."""
    ((question, _),) = one.turns
    items: list[dict[str, Any]] = [{"image": image} for image in one.images]
    if one.frames:
        items.append({"video": np.stack([np.asarray(frame.convert("RGB")) for frame in one.frames])})
    items += [{"audio": make(sound)[0]} for sound in one.sounds]
    return [*items, {"text": question}]


def judge(path: Path, samples: Sequence[Sample], *, verbose: bool) -> dict[str, list[int]]:
    """Count the correct answers and the questions of each task: `{task: [correct, asked]}`."""
    right, asked = Counter[str](), Counter[str]()
    with LLM(path) as llm:
        outputs = llm.generate([as_input(one) for one in samples], SamplingParams(temperature=0, max_tokens=64))
    for one, output in zip(samples, outputs, strict=True):
        ((question, wanted),) = one.turns
        asked[one.task] += 1
        right[one.task] += output.text == wanted
        if verbose and output.text != wanted:
            print(f"{one.task}: {question!r}: {output.text!r}, wanted {wanted!r}")
    return {task: [right[task], asked[task]] for task in TASKS}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=ROOT / "mindie_mm" / "assets" / "tiny")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "tiny_eval.json")
    parser.add_argument("--verbose", action="store_true", help="print every wrong answer")
    args = parser.parse_args()
    scores = judge(args.path, held_out(args.seed, args.samples), verbose=args.verbose)
    right, asked = (sum(column) for column in zip(*scores.values(), strict=True))
    for task, (good, number) in {**scores, "total": (right, asked)}.items():
        print(f"{task:10} {good:4} of {number:4}  {good / number:7.1%}")
    report = {
        "seed": args.seed,
        "samples": args.samples,
        "needed": NEEDED,
        "accuracy": round(right / asked, 4),
        "tasks": {
            task: {"right": good, "asked": number, "accuracy": round(good / number, 4)}
            for task, (good, number) in scores.items()
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(good >= NEEDED * number for good, number in scores.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
