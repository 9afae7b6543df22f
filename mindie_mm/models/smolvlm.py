"""SmolVLM: images as in Idefics3, and videos. In the prompt, each frame of a video is preceded by its time.

Source: arXiv 2504.05299. Token ids, pixels and logits match transformers' `smolvlm`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media, MediaOptions
from mindie_mm.media.image.encoded_image import Data, resize
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.media.video.encoded_video import Video, open_video
from mindie_mm.media.video.frames import check_asked, comes_sampled, num_taken
from mindie_mm.models._idefics import DEFAULTS, IdeficsModel, IdeficsProcessor, read_size, resized, tile_side
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import context_length
from mindie_mm.nn.family import Placeholder, Plan, Spelling, Write
from mindie_mm.nn.pixels import Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.shm import ArraySpec

# The reference uses this template for all conversations with a video, because the published templates skip videos.
_VIDEO_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_FPS_OF_FRAMES = 24
"""Frame rate that the reference assumes for frames without a rate, in frames per second."""
_SKIPPED_S = 1
"""No frames are sampled from the first and the last seconds of a long video. This is their number."""
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENTHS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ONES, _TENS = _SMALL.split(), _TENTHS.split()


class SmolVLMProcessor(IdeficsProcessor):
    """Processor for SmolVLM. Images are processed as in Idefics3.

    The block of an image is the same as in Idefics3. The block of a video contains `pixel_values`, uint8 [frames, side,
    side, 3]. Its grid is the duration, followed by the time of each frame, all in whole seconds.
    """

    config_name = "SmolVLMConfig"
    image_type = "SmolVLMImageProcessor"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        where = str(checkpoint.path)
        token, video = self.config.image_token_id, checkpoint.special_token("video_token") or "<video>"
        self.placeholders = {"image": Placeholder((), token, ()), "video": Placeholder((), token, (), video)}
        settings = checkpoint.preprocessor(
            "video", {"SmolVLMVideoProcessor": {"max_image_size": DEFAULTS["max_image_size"]}}
        )
        sampling = settings.get("video_sampling", {})
        named = {"size": sampling["video_size"]} if "video_size" in sampling else {}
        settings = {**DEFAULTS, **named, **settings}
        check_settings(settings, {"do_resize": True}, where)
        self._frame_size = read_size(settings["size"], where)
        if (side := tile_side(settings, where)) != self.side:
            raise UnsupportedCheckpoint(f"{where}: frames have {side} pixels per side, but tiles have {self.side}")
        self._frame_resample = resample_of(settings, where)
        self.normalizations["video"] = Normalization.read(settings)
        self._num_frames: int | None = sampling.get("max_frames", settings.get("num_frames"))
        self._fps: float | None = sampling.get("fps", settings.get("fps"))
        # In addition to its features, each frame has three tokens in the prompt.
        positions = context_length(self.config.get_text_config())
        self._limit = positions // (self.tile_features + 3)

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        return _VIDEO_TEMPLATE if "video" in kinds else super().template(own, tokenizers, kinds)

    def max_tokens(self, kind: Kind) -> int:
        return super().max_tokens(kind) if kind == "image" else self._limit * self.tile_features

    def worst_case(self, kind: Kind) -> Data:
        if kind == "image":
            return super().worst_case(kind)
        return np.zeros((self._limit, self.side, self.side, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if kind == "image":
            return super().spelling(kind, num_features, grid)
        if (
            len(grid) <= 1
            or min(grid) < 0
            or grid[0] > timedelta.max.total_seconds()
            or (len(grid) - 1) * self.tile_features != num_features
        ):
            return None
        duration, *seconds = grid
        frames = len(seconds)
        intro = (
            f"You are provided the following series of {in_words(frames)} frames from a "
            f"{timedelta(seconds=duration)} [H:MM:SS] video.\n"
        )
        shown = (f"\nFrame from {time // 60:02d}:{time % 60:02d}:{self.spell_whole()}" for time in seconds)
        return Spelling(f"{intro}{''.join(shown)}\n\n", self.runs(frames))

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        if media.kind == "image":
            return super().plan(media, data, counts)
        video = open_video(data, media.options.sample_fps)
        indices = self._sample(video, media.options)
        video.count(indices)
        fps = video.fps or _FPS_OF_FRAMES
        duration = indices[-1] / fps if video.fps is None else video.num_frames / fps
        size, side, resample = self._frame_size, self.side, self._frame_resample
        grid = (int(duration), *(int(index / fps) for index in indices))
        first = size if len(size) == 2 else resized(video.height, video.width, size[0])

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            for place, frame in zip(arrays["pixel_values"], video.decode(indices), strict=True):
                place[...] = resize(resize(frame, *first, resample), side, side, resample)

        plan = Plan(
            num_features=len(indices) * self.tile_features,
            specs=self.specs_of(media.kind, grid),
            settings=f"frames {indices}, {first}, then {side}, {resample}",
            grid=grid,
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if kind == "image":
            return super().specs_of(kind, grid)
        return {"pixel_values": ArraySpec((len(grid) - 1, self.side, self.side, 3), "uint8")}

    def _sample(self, video: Video, options: MediaOptions) -> list[int]:
        """Return the ascending indices of the sampled frames.

        If the caller supplies frames, all of them are taken unless the options ask for fewer.
        """
        check_asked(video, options)
        total, fps = video.num_frames, video.fps
        if fps is None or comes_sampled(video, options):
            return _spread(0, total - 1, num_taken(total, video, options, self._limit))
        most = options.num_frames or options.max_frames or self._num_frames
        rate = options.fps or self._fps
        if most is None or rate is None:
            raise InputError(
                "the checkpoint's video settings lack fps or num_frames; give fps and num_frames with the video"
            )
        count = num_taken(min(round(rate * total / fps), most), video, options, self._limit)
        start, end = 0, total - 1
        if total / fps - 2 * _SKIPPED_S > most * rate:
            start, end = int(_SKIPPED_S * fps), min(int(total - _SKIPPED_S * fps), total - 1)
        if start >= end or end - start + 1 < count:
            start, end = 0, total - 1
        return _spread(start, end, count)

    def _spelled(self, checkpoint: Checkpoint, name: str) -> str:
        return checkpoint.special_token(name) or self.tokens[name]


def _spread(first: int, last: int, count: int) -> list[int]:
    indices: list[int] = np.unique(np.linspace(first, last, count, dtype=int)).tolist()
    return indices


def in_words(number: int) -> str:
    """Spell out an integer from 0 to 999,999, such as "one hundred and twenty-three"."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    joint = ", " if rest >= 100 else " and "
    return f"{in_words(thousands)} thousand" + (joint + in_words(rest) if rest else "")


class SmolVLM(PretrainedFamily):
    """SmolVLM and SmolVLM2 (Marafioti et al., 2025, arXiv 2504.05299), run by transformers' modules."""

    model_types = ("smolvlm",)
    published = "HuggingFaceTB/SmolVLM2-2.2B-Instruct"
    kinds = ("image", "video")
    processor = SmolVLMProcessor
    module_name = "SmolVLMForConditionalGeneration"
    model_class = IdeficsModel
