"""Golden data: a checkpoint made again from its seed, prompts, and what the original implementation computed.

A folder holds the checkpoint's own files but for its weights; `weights.json`, how these were drawn; `cases.json` and
`cases.npz`, the prompts, their ids, the last hidden states, which the checkpoint's head makes logits of, and tokens.
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

from tests.models.contract import Items

GOLDEN = Path(__file__).parent.parent / "golden"


class Case:
    """One golden prompt."""

    def __init__(self, folder: Path, name: str, items: Items, about: Mapping[str, Any], arrays: Any) -> None:
        self.items = items
        self.about = about
        self.images = [folder / image for image in about["images"]]
        self.input_ids = torch.from_numpy(arrays[f"{name}/input_ids"].astype(np.int64))
        self.hidden = torch.from_numpy(arrays[f"{name}/hidden"])
        self.arrays = {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if key.startswith(f"{name}/")}


def cases(folder: Path, items: Any) -> dict[str, Case]:
    """The folder's prompts by name; `items` makes the List[Dict] of one from its entry and its pictures' paths."""
    arrays = np.load(folder / "cases.npz")
    found = json.loads((folder / "cases.json").read_text()).items()
    return {
        name: Case(folder, name, items(about, [str(folder / image) for image in about["images"]]), about, arrays)
        for name, about in found
    }


def drawn_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that `weights.json` describes: normal numbers of one generator, tensor after tensor."""
    recipe = json.loads((folder / "weights.json").read_text())
    generator = torch.Generator().manual_seed(recipe["seed"])
    weights = {}
    for name, (shape, *drawn) in recipe["weights"].items():
        if drawn:
            mean, deviation = drawn
            weights[name] = mean + torch.randn(shape, generator=generator) * deviation
    return weights


def write_checkpoint(folder: Path, out: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """The folder's checkpoint with `weights`, into the directory `out`."""
    for file in folder.iterdir():
        if file.suffix in {".json", ".tiktoken"} and file.stem not in {"weights", "cases", "strings"}:
            shutil.copyfile(file, out / file.name)
    save_file(dict(weights), out / "model.safetensors", metadata={"format": "pt"})


class GoldenReference:
    """The golden data behind the face of a model and its processor."""

    def __init__(self, found: Mapping[str, Case], head: torch.Tensor, token: int) -> None:
        """`head` is the weight that makes logits of hidden states; `token` the placeholder's id."""
        self.cases = found
        self.head = head
        self.token = token

    def case(self, items: Items) -> Case:
        return next(case for case in self.cases.values() if case.items is items)

    def text(self, items: Items) -> str:
        """The whole prompt, its pictures not expanded."""
        raise NotImplementedError

    def inputs(self, items: Items) -> Mapping[str, Any]:
        case = self.case(items)
        return {"input_ids": case.input_ids[None], "case": case}

    def logits(self, items: Items) -> torch.Tensor:
        """float32 [T, vocabulary]."""
        return self.case(items).hidden @ self.head.T

    def in_bfloat16(self) -> None:
        """There is none."""

    def generate(self, items: Items, count: int) -> list[int]:
        """Greedy tokens."""
        return self.case(items).about["generated"][:count]
