"""Options of all media of a chat, in vLLM's form: `mm_processor_kwargs` and `media_io_kwargs`.

These options are the defaults for the chat's media items. An option of the item itself takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from mindie_mm.errors import InputError, blaming
from mindie_mm.inputs.checks import require_dict
from mindie_mm.inputs.items import Kind, Media, MediaOptions, Message, messages_with_media
from mindie_mm.inputs.options import parse_options
from mindie_mm.inputs.prompt_fields import OFF

FRAMES = "frames"
"""Key of the options of a video that is a list of frames."""
MediaDefaults = dict[str, MediaOptions]
"""Options by kind of media, or under the key `FRAMES`."""
_SCOPES: Mapping[str, Kind] = {"images_kwargs": "image", "videos_kwargs": "video"}
_OF_IMAGES = ("min_pixels", "max_pixels")
_OF_FRAMES = ("fps", "num_frames", "min_frames", "max_frames")
_OF_VIDEOS = (*_OF_IMAGES, *_OF_FRAMES, "use_audio_in_video")
_OF_READING = ("fps", "num_frames")
_OWN = {
    "fps": ("num_frames",),
    "num_frames": ("fps", "min_frames", "max_frames"),
    "min_frames": ("num_frames",),
    "max_frames": ("num_frames",),
}
"""For each option of an item, the default options that it overrides, because both exclude or bound each other."""


def media_defaults(mm_processor_kwargs: Any, media_io_kwargs: Any) -> MediaDefaults:
    """Return the options that the two fields of a request contain.

    Args:
        mm_processor_kwargs: Options of images and videos, flat or in `images_kwargs` and `videos_kwargs`.
        media_io_kwargs: Options for reading videos, under the key `video`.

    Raises:
        InputError: A key has no equivalent among the options of items, or its value is invalid.

    """
    with blaming("mm_processor_kwargs"):
        images, videos = _of_processor(_given(mm_processor_kwargs, "mm_processor_kwargs"))
        image = parse_options("image", images, "mm_processor_kwargs", strict=True)
        parse_options("video", videos, "mm_processor_kwargs", strict=True)
    with blaming("media_io_kwargs"):
        reading = _of_reading(_given(media_io_kwargs, "media_io_kwargs"))
        pixels = {name: videos[name] for name in _OF_IMAGES if name in videos}
        if reading and any(name in videos for name in _OF_FRAMES):
            raise InputError(
                "mm_processor_kwargs and media_io_kwargs both choose frames of videos; use only one of these fields "
                "to choose frames"
            )
        rate = {"sample_fps": reading["fps"]} if "fps" in reading else {}
        if rate and "num_frames" in reading:  # vLLM samples at this rate, but at most `num_frames` frames
            reading["max_frames"] = reading.pop("num_frames")
        video = parse_options("video", videos | reading, "media_io_kwargs.video", strict=True)
        frames = parse_options("video", pixels | rate, "media_io_kwargs.video", strict=True)
    options_of = {"image": image, "video": video, FRAMES: frames}
    return {kind: options for kind, options in options_of.items() if options != MediaOptions()}


def with_defaults(messages: Sequence[Message], defaults: MediaDefaults) -> list[Message]:
    """Return `messages`, with `defaults` for the options that their media do not set."""
    return messages_with_media(messages, lambda media: _item(media, defaults)) if defaults else [*messages]


def _item(media: Media, defaults: MediaDefaults) -> Media:
    if media.is_embeddings:
        return media
    default = defaults.get(FRAMES if isinstance(media.source, tuple) else media.kind)
    return media if default is None else msgspec.structs.replace(media, options=_merged(media.options, default))


def _merged(own: MediaOptions, default: MediaOptions) -> MediaOptions:
    """Return the options in `own`, and the options in `default` that `own` neither sets nor excludes."""
    stated = {name: value for name, value in asdict(own).items() if value is not None}
    excluded = {name for one in stated for name in _OWN.get(one, ())}
    left = {name: value for name, value in asdict(default).items() if name not in excluded}
    return MediaOptions(**(left | stated))


def _given(kwargs: Any, field: str) -> dict[str, Any]:
    if any(kwargs is off or (type(kwargs) is type(off) and kwargs == off) for off in OFF):
        return {}
    require_dict(kwargs, field)
    return {key: value for key, value in kwargs.items() if value is not None}


def _of_processor(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of images and of videos."""
    options: dict[Kind, dict[str, Any]] = {"image": {}, "video": {}}
    flat = {key: value for key, value in kwargs.items() if key not in _SCOPES}
    _require_known(flat, (*_OF_VIDEOS, *_SCOPES), "mm_processor_kwargs")
    options["video"] |= flat
    options["image"] |= {key: flat[key] for key in _OF_IMAGES if key in flat}
    for scope, kind in _SCOPES.items():
        where = f"mm_processor_kwargs.{scope}"
        scoped = _given(kwargs.get(scope), where)
        _require_known(scoped, _OF_IMAGES if kind == "image" else _OF_VIDEOS, where)
        options[kind] |= scoped
    return options["image"], options["video"]


def _of_reading(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for reading videos. In vLLM, -1 stands for no limit."""
    _require_known(kwargs, ("video",), "media_io_kwargs")
    video = _given(kwargs.get("video"), "media_io_kwargs.video")
    _require_known(video, _OF_READING, "media_io_kwargs.video")
    if video.get("num_frames") == -1 and video.get("fps", -1) == -1:
        raise InputError(
            "media_io_kwargs.video.num_frames is -1, which would select all frames; set fps, or give the number of "
            "frames"
        )
    return {key: value for key, value in video.items() if value != -1}


def _require_known(kwargs: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if (unknown := next((key for key in kwargs if key not in known), None)) is not None:
        raise InputError(
            f"{where} has the key {str(unknown)[:40]!r}, which is not supported; supported: {', '.join(known)}"
        )
