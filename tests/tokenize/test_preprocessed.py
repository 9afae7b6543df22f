"""Tests for the cache of preprocessed media. Repeated media are copied from the cache instead of decoded again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindie_mm.errors import MediaError
from mindie_mm.media.image import encoded_image as image
from mindie_mm.shm import Arena, Ref, attach, release
from mindie_mm.tokenize import Tokenizer, stores
from mindie_mm.tokenize.stores import ArenaStore, Preprocessed
from tests.media_samples import encode_video, encoded, moving_frames, photograph

CAT, COFFEE, ROCKET = (encoded(photograph(name, (112, 84))) for name in ("chelsea.png", "coffee.png", "rocket.jpg"))
NBYTES = 112 * 84 * 3
"""Bytes of one image's patches, which are uint8."""


class Run:
    """A tokenizer with a cache of preprocessed media, and a counter of decoded images."""

    def __init__(self, checkpoint_path: Path, arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made_of = checkpoint_path, arena
        self._path_file = folder / "shm_name.txt"
        self.num_decoded = 0
        decode = image.PlainJpeg.decode

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_decoded += 1
            return decode(*args, **kwargs)

        monkeypatch.setattr(image.PlainJpeg, "decode", counted)
        self.keep(2 * NBYTES)

    def keep(self, capacity_bytes: int) -> None:
        path, arena = self._made_of
        self._tokenizer = Tokenizer.from_pretrained(path, ArenaStore(arena, preprocessed=Preprocessed(capacity_bytes)))

    def arrays(self, *items: dict[str, Any]) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Tokenize `items`, return the arrays of each item from shared memory, and free their blocks."""
        ids = self._tokenizer.tokenize(list(items), self._path_file)
        try:
            return [*_arrays(ids[ids < 0].tolist())]
        finally:
            release(self._path_file)


def _arrays(words: Sequence[int]) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    for name, shape in zip(words[::2], words[1::2], strict=True):
        with attach(Ref.from_words(name, shape)) as view:
            yield {name: array.copy() for name, array in view.items()}


@pytest.fixture
def run(checkpoint_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with Arena.create(2**22) as arena:
        yield Run(checkpoint_path, arena, tmp_path, monkeypatch)


def assert_equal(one: list[dict[str, np.ndarray[Any, Any]]], other: list[dict[str, np.ndarray[Any, Any]]]) -> None:
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def test_a_repeated_image_is_not_decoded_again(run: Run) -> None:
    once = run.arrays({"image": CAT}, {"image": COFFEE})
    assert run.num_decoded == 2
    again = run.arrays({"image": COFFEE}, {"image": CAT})
    assert run.num_decoded == 2
    assert_equal(again, once[::-1])


def test_an_image_repeated_in_one_prompt_is_decoded_once(run: Run) -> None:
    first, second = run.arrays({"image": CAT}, {"image": CAT})
    assert run.num_decoded == 1
    assert_equal([first], [second])


def test_other_settings_decode_an_image_again(run: Run) -> None:
    (large,) = run.arrays({"image": CAT})
    (small,) = run.arrays({"image": CAT, "max_pixels": 56 * 56})
    assert run.num_decoded == 2
    assert small["pixel_values"].nbytes < large["pixel_values"].nbytes


def test_the_least_recently_used_image_is_dropped(run: Run) -> None:
    for data in (CAT, COFFEE, CAT, ROCKET):  # ROCKET evicts COFFEE
        run.arrays({"image": data})
    assert run.num_decoded == 3
    run.arrays({"image": CAT}, {"image": ROCKET})
    assert run.num_decoded == 3
    run.arrays({"image": COFFEE})
    assert run.num_decoded == 4


@pytest.mark.parametrize("capacity_bytes", [0, NBYTES - 1])
def test_an_image_larger_than_the_cache_is_not_kept(run: Run, capacity_bytes: int) -> None:
    run.keep(capacity_bytes)
    assert_equal(run.arrays({"image": CAT}), run.arrays({"image": CAT}))
    assert run.num_decoded == 2


def test_an_image_that_failed_is_not_kept(run: Run) -> None:
    cut = CAT[: len(CAT) // 2]
    for _ in range(2):
        with pytest.raises(MediaError, match="media item 0"):
            run.arrays({"image": cut})


def test_an_item_is_served_without_memory_for_a_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> np.ndarray[Any, Any]:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(stores, "np", SimpleNamespace(array=full))
        for _ in range(3):
            run.arrays({"image": CAT})
    run.arrays({"image": CAT}, {"image": COFFEE})
    assert run.num_decoded == 5
    run.arrays({"image": CAT}, {"image": COFFEE})
    assert run.num_decoded == 5, "an item that was not cached must not use space in the cache"


def test_a_repeated_video_gives_the_same_arrays(run: Run) -> None:
    run.keep(2**21)
    video = {"video": encode_video(moving_frames(8), fps=4)}
    assert_equal(run.arrays(video), run.arrays(video))


def test_threads_may_keep_and_copy_at_once() -> None:
    """The cache never exceeds its size, and each copy has the content that belongs to its digest."""
    kept = Preprocessed(8 * 2**20)
    contents = [bytes([number]) * 32 for number in range(12)]

    def use(seed: int) -> None:
        draws = np.random.default_rng(seed)
        for number in draws.integers(0, len(contents), 200):
            copied = {"pixel_values": np.zeros(2**20, np.uint8)}
            if kept.copy(contents[number], copied):
                assert (copied["pixel_values"] == number).all()
            kept.keep(contents[number], {"pixel_values": np.full(2**20, number, np.uint8)})

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(use, seed) for seed in range(6)]:
            done.result()
    found = [digest for digest in contents if kept.copy(digest, {"pixel_values": np.empty(2**20, np.uint8)})]
    assert len(found) == 8
