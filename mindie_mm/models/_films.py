"""Films whose audio is part of the video item (`use_audio_in_video`).

Source: arXiv 2503.20215, section 2.2 (time-interleaving). The tokens of the frames and of the audio alternate, either
in chunks of the same length in time, or each at its time. The order equals `replace_video_with_audio_token` of
transformers' processors, and the positions equal `get_rope_index` of their models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mindie_mm.models._clips import SPECTROGRAM
from mindie_mm.models._mrope import Block, grid_axes
from mindie_mm.models._qwen import PICOSECONDS
from mindie_mm.nn.family import Placeholder, Plan, Spelling, Write

Grid = tuple[int, ...]
_GRID_NUMBERS = 5


def is_film(grid: Grid) -> bool:
    """Return whether a grid is (t, h, w, interval, frames), where `frames` belong to the spectrogram of the audio."""
    return len(grid) == _GRID_NUMBERS


def film_plan(frames: tuple[Plan, Write], clip: tuple[Plan, Write]) -> tuple[Plan, Write]:
    """Combine the plan of a film's frames and the plan of its audio into the plan of the film."""
    (video, write_video), (audio, write_audio) = frames, clip

    def write(arrays: Mapping[str, NDArray[Any]]) -> None:
        write_video({name: array for name, array in arrays.items() if name != SPECTROGRAM})
        write_audio({SPECTROGRAM: arrays[SPECTROGRAM]})

    plan = Plan(
        num_features=video.num_features + audio.num_features,
        specs={**video.specs, **audio.specs},
        settings=f"{video.settings}, with {audio.settings}",
        grid=(*video.grid, *audio.grid),
    )
    return plan, write


@dataclass(frozen=True, slots=True)
class FilmLayout:
    """Order and positions of the tokens of a film, in chunks of frames and of audio in turn."""

    side_step: ClassVar[int] = 0
    """Distance between the positions of the two tokens on each side of a film."""
    merge: int
    """Number of patches along each side that become one token."""
    num_audio_tokens: Callable[[int], int]
    """Function from the number of frames of the spectrogram to the number of tokens of the audio."""
    per_second: int | float
    """Positions per second of video, and tokens of audio that belong to the same length of time."""
    chunk_s: float
    """Length in seconds of a chunk."""

    def num_frame_tokens(self, grid: Grid) -> int:
        """Return the number of tokens of the frames."""
        return math.prod(grid[:3]) // self.merge**2

    def num_features(self, grid: Grid) -> int:
        """Return the number of tokens of the frames and the audio."""
        return self.num_frame_tokens(grid) + self.num_audio_tokens(grid[4])

    def is_audio(self, grid: Grid) -> NDArray[np.bool_]:
        """Return for each token of a film whether it belongs to the audio."""
        runs = self._runs(grid)
        return np.repeat(np.arange(len(runs)) % 2 == 1, runs)

    def spelling(self, video: Placeholder, audio: Placeholder, grid: Grid) -> Spelling:
        """Return the spelling of a film: the placeholders of both kinds in turn, inside the frame of the audio."""
        ids = np.where(self.is_audio(grid), audio.token, video.token)
        return Spelling(runs=[[*audio.before, *ids.tolist(), *audio.after]], second_token=audio.token)

    def block(self, first: int, grid: Grid) -> Block:
        """Return the positions of a film whose first placeholder is at `first`, with the two tokens on each side."""
        is_audio = self.is_audio(grid)
        t, h, w = grid[:3]
        axes = np.empty((3, len(is_audio)), np.int64)
        axes[:, is_audio] = np.arange(np.count_nonzero(is_audio))
        axes[:, ~is_audio] = grid_axes((t, h // self.merge, w // self.merge), *self.spacing(grid))
        # The references continue after the last run, even if a position of an earlier run is larger.
        end = int(axes[:, -self.last_run(grid) :].max()) + 2 + self.side_step
        before = np.tile(np.arange(2) * self.side_step, (3, 1))
        inside = axes + 1 + self.side_step
        return Block(first - 2, np.concatenate([before, inside, before + end], axis=1), end + self.side_step + 1)

    def spacing(self, grid: Grid) -> tuple[float, float]:
        """Return the distance between two steps on the time axis of a video, and the factor for all times.

        `grid_axes` takes both, because the order of the products affects rounding.
        """
        return grid[3] / PICOSECONDS, self.per_second

    def last_run(self, grid: Grid) -> int:
        """Return the number of tokens of the last chunk."""
        return next(length for length in reversed(self._runs(grid)) if length)

    def _runs(self, grid: Grid) -> list[int]:
        """Return the token count of each chunk. Chunks of frames and of audio alternate."""
        size = int(self.per_second * self.chunk_s)
        frames = _chunks(self._frame_times(grid), size)
        audio = _chunks(np.arange(self.num_audio_tokens(grid[4])), size)
        return [length for pair in zip_longest(frames, audio, fillvalue=0) for length in pair]

    def _frame_times(self, grid: Grid) -> NDArray[np.float32]:
        """Return the position in time of each token of the frames, in the precision of the reference's model."""
        interval, scale = map(np.float32, self.spacing(grid))
        times = np.arange(grid[0], dtype=np.float32) * interval * scale
        return np.repeat(times, self.num_frame_tokens(grid) // grid[0])


class MergedFilmLayout(FilmLayout):
    """Order and positions of the tokens of a film, each frame at its time among the tokens of the audio."""

    side_step = 1

    def is_audio(self, grid: Grid) -> NDArray[np.bool_]:
        audio = np.arange(self.num_audio_tokens(grid[4]))
        is_audio = np.zeros(self.num_features(grid), np.bool_)
        is_audio[audio + np.searchsorted(self._exact_times(grid), audio, side="right")] = True
        return is_audio

    def _exact_times(self, grid: Grid) -> NDArray[np.float64]:
        """Return the position in time of each token of the frames, in the precision of the reference's processor."""
        times = np.arange(grid[0]) * (1 / _rate(grid)) * self.per_second
        return np.repeat(times, self.num_frame_tokens(grid) // grid[0])

    def spacing(self, grid: Grid) -> tuple[float, float]:
        return self.per_second / _rate(grid), 1.0

    def last_run(self, grid: Grid) -> int:
        is_audio = self.is_audio(grid)
        return len(is_audio) - 1 - int(np.flatnonzero(is_audio != is_audio[-1])[-1])


def _rate(grid: Grid) -> float:
    """Return the number of steps per second.

    The grid has the duration of a step, so the inverse is rounded to 6 decimal places.
    """
    return round(PICOSECONDS / grid[3], 6)


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
