"""Golden data: prompts, results of the original implementation, and a checkpoint that is rebuilt from its seed.

A folder contains the checkpoint's files except its weights, which `weights.json` describes: the seed, and the shape and
distribution of each weight. `cases.json` and `cases.npz` contain the prompts, their token ids, last hidden states and
generated tokens. The checkpoint's head turns the hidden states into logits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.models.references import Items

GOLDEN = Path(__file__).parent.parent / "golden"


class Case:
    """One prompt of the golden data, with the original implementation's results."""

    def __init__(self, folder: Path, name: str, items: Items, about: Mapping[str, Any], arrays: Any) -> None:
        self.items = items
        self.about = about
        self.images = [folder / image for image in about["images"]]
        self.input_ids = torch.from_numpy(arrays[f"{name}/input_ids"].astype(np.int64))
        self.hidden = torch.from_numpy(arrays[f"{name}/hidden"])
        self.arrays = {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if key.startswith(f"{name}/")}


def cases(folder: Path, items: Any) -> dict[str, Case]:
    """Return the folder's prompts by name.

    `items` is a function that converts a prompt's entry of cases.json and the paths of its images to a `List[Dict]`.
    """
    arrays = np.load(folder / "cases.npz")
    found = json.loads((folder / "cases.json").read_text()).items()
    return {
        name: Case(folder, name, items(about, [str(folder / image) for image in about["images"]]), about, arrays)
        for name, about in found
    }


def drawn_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Draw the weights that `weights.json` describes from one normal generator, in the order of the file."""
    recipe = json.loads((folder / "weights.json").read_text())
    generator = torch.Generator().manual_seed(recipe["seed"])
    weights = {}
    for name, (shape, *drawn) in recipe["weights"].items():
        if drawn:
            mean, deviation = drawn
            weights[name] = mean + torch.randn(shape, generator=generator) * deviation
    return weights


def write_checkpoint(folder: Path, out: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the folder's checkpoint with `weights` into the directory `out`."""
    for file in folder.iterdir():
        if file.suffix in {".json", ".tiktoken"} and file.stem not in {"weights", "cases", "strings"}:
            shutil.copyfile(file, out / file.name)
    save_file(dict(weights), out / "model.safetensors", metadata={"format": "pt"})


class GoldenReference:
    """Golden data with the interface of Reference."""

    def __init__(self, found: Mapping[str, Case], head: torch.Tensor, token: int) -> None:
        """Store the cases. `head` turns hidden states into logits, and `token` is the id of the placeholder."""
        self.cases = found
        self.head = head
        self.token = token

    def case(self, items: Items) -> Case:
        return next(case for case in self.cases.values() if case.items is items)

    def text(self, items: Items) -> str:
        """Return the whole prompt as text, in which each image is a single marker."""
        raise NotImplementedError

    def inputs(self, items: Items) -> Mapping[str, Any]:
        case = self.case(items)
        ids = case.input_ids[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "case": case}

    def logits(self, items: Items) -> torch.Tensor:
        """Return the logits, float32 [T, vocabulary]."""
        return self.case(items).hidden @ self.head.T

    def in_bfloat16(self) -> None:
        """Return None, because golden data have no model."""

    def generate(self, items: Items, count: int) -> list[int]:
        """Return the first `count` tokens that the original implementation generated greedily."""
        return self.case(items).about["generated"][:count]
