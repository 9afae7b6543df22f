"""Contract of families with a layout in MindIE's wire format.

Either half of MindIE may be replaced: its worker reads ids of our tokenizer, and our worker reads ids of its tokenizer.
A stand-in for MindIE runs in its own process (`tests/mindie_stand_in.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mindie_mm.engine.core import Engine
from mindie_mm.errors import BadReference, FeatureCountMismatch, LimitExceeded, SegmentMissing
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.mindie import mindie_pad
from mindie_mm.nn.splice import MediaItem, plain_ids
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import Items, run

STAND_IN = Path(__file__).parents[1] / "mindie_stand_in.py"
Arrays = Sequence[np.ndarray | None]


@dataclass(frozen=True)
class Native:
    """A prompt in our own wire format."""

    prompt: Items
    ids: np.ndarray
    """The ids of MindIE's prompt, with one placeholder per feature, int64 [T]."""
    words: torch.Tensor
    """The same ids with the handle words of our own wire format."""
    arrays: Arrays
    logits: torch.Tensor


class StandIn:
    """The process of the stand-in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [sys.executable, str(STAND_IN)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, do: str, path_file: Path, given: Arrays = (), **command: Any) -> list[np.ndarray | None]:
        """Run a command on `given` and return the arrays that it finds."""
        files = {name: str(self._folder / f"{name}.npz") for name in ("given", "found")}
        np.savez(files["given"], *(np.empty(0) if array is None else array for array in given))
        line = json.dumps({"do": do, "path_file": str(path_file), **files, **command})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"
        if do == "release":
            return []
        with np.load(files["found"]) as file:
            return [file[name] if file[name].size else None for name in file.files]

    def close(self) -> None:
        self._process.communicate()


class MindIEContract:
    """Tests for a family with a MindIE layout. List this class before `FamilyContract`."""

    mindie_layout: ClassVar[str]
    """Name of the layout in the stand-in."""
    mindie_prompts: ClassVar[Sequence[Items]]
    """Prompts with media."""
    mindie_start: ClassVar[str | None] = None
    """Token before an item."""
    mindie_tolerance: ClassVar[float] = 0.0
    """Largest error of logits if the stand-in has stored the pixels with less precision."""

    mindie_pixel_tolerance: ClassVar[float] = 0.0
    """Largest error of an array."""

    def mindie_arrays(self, prompt: Items, items: Sequence[MediaItem], model: Any, ids: np.ndarray) -> Arrays:
        """Return the arrays that MindIE stores for a prompt, in the order of their words. An absent array is None.

        Args:
            prompt: The prompt.
            items: Its media in our own wire format.
            model: The model.
            ids: Ids of the prompt with one placeholder per feature.

        """
        raise NotImplementedError

    def mindie_keeps(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids of the prompt in our own wire format also occur in MindIE's prompt, bool [T]."""
        return np.ones(len(ids), bool)

    @pytest.fixture(scope="class")
    @classmethod
    def mindie(cls, path: Path) -> Iterator[Tokenizer]:
        with Tokenizer.from_pretrained(path, wire="mindie") as tokenizer:
            yield tokenizer

    @pytest.fixture(scope="class")
    @classmethod
    def mindie_tokens(cls, path: Path, processor: Any) -> dict[str, int]:
        placeholders = processor.placeholders
        tokens = {kind: placeholder.token for kind, placeholder in placeholders.items()}
        first = next(iter(placeholders.values()))
        for name, ids in (("start", first.before), ("end", first.after)):
            if ids:
                tokens[name] = ids[0]
        checkpoint = Checkpoint.open(path)
        if cls.mindie_start is not None:
            tokens["start"] = checkpoint.token_id(cls.mindie_start)
        return {**tokens, "pad": mindie_pad(checkpoint.config)}

    @pytest.fixture(scope="class")
    @classmethod
    def mindie_natives(
        cls, tokenizer: Tokenizer, model: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[list[Native]]:
        path_file = tmp_path_factory.mktemp("natives") / "shm_name.txt"
        natives: list[Native] = []
        for prompt in cls.mindie_prompts:
            ids = tokenizer.tokenize(prompt, path_file)
            items = model.read(ids.numpy())
            plain = plain_ids(ids.numpy(), items)
            keep = cls().mindie_keeps(plain)
            words = ids[torch.from_numpy(keep)]
            arrays = cls().mindie_arrays(prompt, items, model, plain)
            natives.append(Native(prompt, plain[keep], words, arrays, model.logits(words)))
        yield natives
        release(path_file)

    def test_a_mindie_worker_reads_the_pixels_and_grids_of_our_tokenizer(
        self, model, mindie, mindie_natives, stand_in, mindie_tokens, path_file
    ):
        for native in mindie_natives:
            ids = mindie.tokenize(native.prompt, path_file).numpy()
            assert len(ids) == len(native.ids)
            found = stand_in.run("read", path_file, [ids], layout=self.mindie_layout, tokens=mindie_tokens)
            assert len(found) == len(native.arrays)
            for own, theirs in zip(found, native.arrays, strict=True):
                assert (own is None) == (theirs is None)
                if own is not None and theirs is not None:
                    assert (own.dtype, own.shape) == (theirs.dtype, theirs.shape)
                    assert np.abs(own.astype(np.float64) - theirs).max() <= self.mindie_pixel_tolerance
            stand_in.run("release", path_file)
            assert not any(Path("/dev/shm", segment).exists() for segment in path_file.read_text().split())

    def test_our_worker_reads_ids_of_a_mindie_tokenizer(
        self, model, mindie_natives, stand_in, mindie_tokens, path_file
    ):
        for native in mindie_natives:
            given = [native.ids, *native.arrays]
            (ids,) = stand_in.run("write", path_file, given, layout=self.mindie_layout, tokens=mindie_tokens)
            assert plain_ids(ids, model.read(ids)).tolist() == native.ids.tolist()
            assert (model.logits(torch.from_numpy(ids)) - native.logits).abs().max() <= self.mindie_tolerance
            outputs, errors = run(Engine(model, EngineConfig()), [native.words, torch.from_numpy(ids)], max_tokens=4)
            assert outputs[0] == outputs[1], errors
            recorded = path_file.read_text().split()
            assert release(path_file) == len(recorded) > 0
            assert not any(Path("/dev/shm", segment).exists() for segment in recorded)
            with pytest.raises(SegmentMissing):
                model.read(ids)
            path_file.unlink()

    def test_our_worker_reads_mindies_format_from_our_tokenizer(self, model, mindie, mindie_natives, path_file):
        for native in mindie_natives:
            ids = mindie.tokenize(native.prompt, path_file)
            assert plain_ids(ids.numpy(), model.read(ids.numpy())).tolist() == native.ids.tolist()
            assert (model.logits(ids) - native.logits).abs().max() <= self.mindie_tolerance

    def test_damaged_words_of_mindies_format_are_refused(self, model, mindie, path_file):
        ids = mindie.tokenize(self.mindie_prompts[0], path_file).numpy()
        (words,) = np.nonzero(ids < -1)
        damaged = [np.delete(ids, words[-1]), np.insert(ids, words[-1] + 1, ids[words[0]])]
        for slot in words:
            flipped = (int(ids[slot]) ^ 1 << bit for bit in (0, 2, 3, 21, 40, 59, 62))
            for word in {*flipped, 0, -1, 7, -(1 << 63)} - {int(ids[slot])}:
                damaged.append(ids.copy())
                damaged[-1][slot] = word
        for other in damaged:
            with pytest.raises((BadReference, FeatureCountMismatch, LimitExceeded)):
                model.read(other)
