"""Films whose sound is part of the video item (`use_audio_in_video`), as in Qwen2.5-Omni.

Source: arXiv 2503.20215, section 2.2 (time-interleaving). The tokens of the pictures and of the sound alternate in
chunks of the same length in time. The order equals `replace_video_with_audio_token` of transformers' processor, and the
positions equal `get_rope_index` of its model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.models._clips import SPECTROGRAM
from mindie_mm.models._mrope import Block, grid_axes
from mindie_mm.models._qwen import PICOSECONDS
from mindie_mm.nn.family import Placeholder, Plan, Spelling, Write

Grid = tuple[int, ...]
_GRID_NUMBERS = 5


def is_film(grid: Grid) -> bool:
    """Return whether a grid is (t, h, w, interval, frames), where `frames` belong to the spectrogram of the sound."""
    return len(grid) == _GRID_NUMBERS


def film_plan(pictures: tuple[Plan, Write], clip: tuple[Plan, Write]) -> tuple[Plan, Write]:
    """Return the plan of a film from those of its pictures and of its sound."""
    (video, write_video), (sound, write_sound) = pictures, clip

    def write(arrays: Mapping[str, NDArray[Any]]) -> None:
        write_video({name: array for name, array in arrays.items() if name != SPECTROGRAM})
        write_sound({SPECTROGRAM: arrays[SPECTROGRAM]})

    plan = Plan(
        num_features=video.num_features + sound.num_features,
        specs={**video.specs, **sound.specs},
        settings=f"{video.settings}, with {sound.settings}",
        grid=(*video.grid, *sound.grid),
    )
    return plan, write


@dataclass(frozen=True, slots=True)
class FilmLayout:
    """Order and positions of the tokens of a film."""

    merge: int
    """Number of patches along each side that become one token."""
    num_sounds: Callable[[int], int]
    """Function from the number of frames of the spectrogram to the number of tokens of the sound."""
    per_second: int | float
    """Positions per second of video, and tokens of sound that belong to the same length of time."""
    chunk_s: float
    """Length in seconds of a chunk."""

    def num_pictures(self, grid: Grid) -> int:
        """Return the number of tokens of the pictures."""
        return math.prod(grid[:3]) // self.merge**2

    def num_features(self, grid: Grid) -> int:
        """Return the number of tokens of the pictures and the sound."""
        return self.num_pictures(grid) + self.num_sounds(grid[4])

    def is_sound(self, grid: Grid) -> NDArray[np.bool_]:
        """Return for each token of a film whether it belongs to the sound."""
        runs = self._runs(grid)
        return np.repeat(np.arange(len(runs)) % 2 == 1, runs)

    def spelling(self, video: Placeholder, audio: Placeholder, grid: Grid) -> Spelling:
        """Return the spelling of a film: the placeholders of both kinds in turn, inside the frame of the sound."""
        ids = np.where(self.is_sound(grid), audio.token, video.token)
        return Spelling(runs=[[*audio.before, *ids.tolist(), *audio.after]], second_token=audio.token)

    def block(self, first: int, grid: Grid) -> Block:
        """Return the positions of a film whose first placeholder is at `first`, with the two tokens on each side.

        Both tokens on a side have the same position, as in the reference.
        """
        is_sound = self.is_sound(grid)
        t, h, w = grid[:3]
        axes = np.empty((3, len(is_sound)), np.int64)
        axes[:, is_sound] = np.arange(np.count_nonzero(is_sound))
        axes[:, ~is_sound] = grid_axes((t, h // self.merge, w // self.merge), grid[3] / PICOSECONDS, self.per_second)
        # The reference continues after the last chunk, even if a position of an earlier chunk is larger.
        last = next(length for length in reversed(self._runs(grid)) if length)
        end = int(axes[:, -last:].max()) + 2
        before, after = np.zeros((3, 2), np.int64), np.full((3, 2), end)
        return Block(first - 2, np.concatenate([before, axes + 1, after], axis=1), end + 1)

    def _runs(self, grid: Grid) -> list[int]:
        """Return the number of tokens of each chunk of pictures and of sound, in turn."""
        size = int(self.per_second * self.chunk_s)
        each = self.num_pictures(grid) // grid[0]
        pictures = _chunks(np.repeat(self._times(grid), each), size)
        sounds = _chunks(np.arange(self.num_sounds(grid[4])), size)
        return [length for pair in zip_longest(pictures, sounds, fillvalue=0) for length in pair]

    def _times(self, grid: Grid) -> NDArray[np.float32]:
        """Return the position in time of each picture, in the precision of the reference's model."""
        return np.arange(grid[0], dtype=np.float32) * np.float32(grid[3] / PICOSECONDS) * np.float32(self.per_second)


def _chunks(values: NDArray[Any], size: int) -> list[int]:
    """Return the lengths of the chunks of ascending `values`. Chunk k contains the values below k * size, from k = 1.

    As in the reference, no chunk is empty: if a value skips several chunks, each of the next values starts a chunk.
    """
    starts, chunk = [0], 1
    while (place := max(int(np.searchsorted(values, chunk * size)), starts[-1] + (chunk > 1))) < len(values):
        starts.append(place)
        chunk += 1
    lengths: list[int] = np.diff([*starts, len(values)]).tolist()
    return lengths
