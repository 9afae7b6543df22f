"""Parsing of the options of media items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from mindie_mm.errors import InputError
from mindie_mm.inputs.checks import shown, whole
from mindie_mm.inputs.items import Detail, Kind, MediaOptions
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
                raise InputError(f"{where}.detail is {value!r}; it must be one of {', '.join(_DETAILS)}")
            values[name] = value
        elif name == "use_audio_in_video":
            if not isinstance(value, bool):
                raise InputError(f"{where}.{name} is {value!r}; it must be true or false")
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
        raise InputError(f"{where} is {value!r}; it must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise InputError(f"{where} is {shown(value)}; it must be from {low} to {high}")
    return value


def _number(value: Any, above: float, high: float, where: str) -> float:
    value = python_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where} is {value!r}; it must be a number")
    if not above < value <= high:
        raise InputError(f"{where} is {shown(value)}; it must be above {above:g} and at most {high:g}")
    return float(value)
