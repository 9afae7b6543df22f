"""Parsing of the options of media items: of one item, and of the fields of a request that apply to all its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import msgspec

from mindie_mm.errors import InputError, blaming
from mindie_mm.inputs.checks import require_dict, shown, whole
from mindie_mm.inputs.items import Detail, Kind, Media, MediaOptions, Message, messages_with_media
from mindie_mm.inputs.prompt_fields import OFF
from mindie_mm.inputs.unknown_keys import pass_over
from mindie_mm.settings.limits import python_number

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels", "detail"),
    "video": (
        *("min_pixels", "max_pixels", "fps", "num_frames", "min_frames", "max_frames", "sample_fps", "detail"),
        "use_audio_in_video",
    ),
    "audio": ("sampling_rate",),
}
_ORDERED = (
    ("min_pixels", "max_pixels"),
    ("min_frames", "max_frames"),
    ("min_frames", "num_frames"),
    ("num_frames", "max_frames"),
)
_DETAILS = get_args(Detail)
_MAX_PIXELS = 2**31
_MAX_FRAMES = 2**20
_MIN_FPS, _MAX_FPS = 1e-6, 1000.0
_MAX_SAMPLING_RATE = 768_000
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


def parse_options(kind: Kind, given: Mapping[str, Any], where: str, *, strict: bool) -> MediaOptions:
    """Parse the options of an item, that is, all its keys except the source. Pass unknown keys to `pass_over`.

    Raises:
        InputError: Items of this kind do not have one of the options, or a value is invalid.

    """
    allowed = _OPTIONS[kind]
    known = ", ".join(allowed) + (", only with an array of samples" if kind == "audio" else "")
    unknown = [name for name in given if name not in allowed]
    pass_over(unknown, where, f"an item of kind {kind} accepts {known}", strict=strict)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in allowed:
            continue
        if name == "detail":
            if value not in _DETAILS:
                raise InputError(f"{where}.detail={value!r} must be one of {', '.join(_DETAILS)}")
            values[name] = value
        elif name == "use_audio_in_video":
            if not isinstance(value, bool):
                raise InputError(f"{where}.{name}={value!r} must be true or false")
            values[name] = value
        elif name in {"fps", "sample_fps"}:
            values[name] = _number(value, _MIN_FPS, _MAX_FPS, f"{where}.{name}")
        elif name == "sampling_rate":
            values[name] = _integer(value, 1, _MAX_SAMPLING_RATE, f"{where}.{name}")
        else:
            limit = _MAX_PIXELS if name.endswith("pixels") else _MAX_FRAMES
            values[name] = _integer(value, 1, limit, f"{where}.{name}")
    options = MediaOptions(**values)
    _require_order(options, where)
    return options


def _require_order(options: MediaOptions, where: str) -> None:
    for low, high in _ORDERED:
        least, most = getattr(options, low), getattr(options, high)
        if least is not None and most is not None and least > most:
            raise InputError(f"{where}: {low} {least} is above {high} {most}")
    if options.fps is not None and options.num_frames is not None:
        raise InputError(f"{where} has both fps and num_frames; give only one")


def _integer(value: Any, low: int, high: int, where: str) -> int:
    value = whole(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}={value!r} must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise InputError(f"{where}={shown(value)} must be from {low} to {high}")
    return value


def _number(value: Any, above: float, high: float, where: str) -> float:
    value = python_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}={value!r} must be a number")
    if not above < value <= high:
        raise InputError(f"{where}={shown(value)} must be above {above:g} and at most {high:g}")
    return float(value)


def media_defaults(mm_processor_kwargs: Any, media_io_kwargs: Any) -> MediaDefaults:
    """Return the options that the two fields of a request contain.

    Args:
        mm_processor_kwargs: Options of images and videos, flat or in `images_kwargs` and `videos_kwargs`.
        media_io_kwargs: Options for reading videos, under the key `video`.

    Raises:
        InputError: A key has no equivalent among the options of items, or its value is invalid.

    """
    if mm_processor_kwargs is None and media_io_kwargs is None:
        return {}
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
