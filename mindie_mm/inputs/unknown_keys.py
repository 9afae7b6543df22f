"""Keys of an item, or of a chat's content part, that mean nothing here: which are passed over, and which are refused.

Clients send what other servers take, such as `id`, `annotations` or a picture's `format`. A key that may have been
meant to change how the item is read is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from mindie_mm.errors import InputError
from mindie_mm.inputs.items import MediaOptions

_log = logging.getLogger(__name__)

_OTHERS_OPTIONS = frozenset(
    {
        # qwen-vl-utils, DashScope
        *("nframes", "resized_height", "resized_width", "total_pixels", "video_start", "video_end"),
        # of a clip, a crop or a rate
        *("start", "end", "start_time", "end_time", "start_offset", "end_offset", "speed", "crop", "rotation"),
        *("sample_rate", "frame_rate", "framerate", "rate"),
        # Gemini, transformers, vLLM
        *("video_metadata", "frames", "do_sample_frames", "frames_indices", "size", "resolution", "media_resolution"),
        # SGLang, LMDeploy, InternVL, MiniCPM
        *("max_dynamic_patch", "min_dynamic_patch", "max_num", "max_slice_nums", "use_image_id"),
        # another source, or features in its place
        *("url", "path", "base64", "data", "bytes", "file", "file_id", "file_data", "embeds", "image_embeds"),
        *("audio_embeds", "precomputed_embeddings"),
    }
)
"""What other servers and libraries call options and sources, which would make another prompt."""
_MAX_TOLD = 256
"""Keys that are told: a client can think of any number."""
_MAX_SHOWN = 40
_MIN_SHORTENED = 6
_told: set[str] = set()


def pass_over(keys: Iterable[object], where: str, takes: str, *, strict: bool) -> None:
    """Pass over unknown keys of an item that errors call `where`, each with a warning, the first time that it comes.

    Raises:
        InputError: A key is an option of another kind of items, or looks like one; if `strict`, any key.

    """
    for key in map(str, keys):
        near = _near(key)
        if strict or near or key in _OTHERS_OPTIONS:
            hint = f"; did you mean {near!r}?" if near and near != key else ""
            raise InputError(f"{where} has the unknown key {key[:_MAX_SHOWN]!r}{hint}; {takes}")
        _warn_once(key[:_MAX_SHOWN])


def _near(key: str) -> str | None:
    """Return the option that `key` is, or is within a slip of the pen: a letter more, fewer, another, or swapped."""
    if len(key) > _MAX_SHOWN:
        return None
    letters = _letters(key)
    return next((_SPELLED[one] for one in (letters, *_shortened(letters)) if one in _SPELLED), None)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _shortened(letters: str) -> list[str]:
    """`letters` without one of them; of a short word, which would be another word, none."""
    return [letters[:i] + letters[i + 1 :] for i in range(len(letters))] if len(letters) >= _MIN_SHORTENED else []


# Words of which one letter is left out meet where the words differ by one letter.
_SPELLED: Mapping[str, str] = {
    spelled: name for name in MediaOptions.__slots__ for spelled in (*_shortened(_letters(name)), _letters(name))
}


def _warn_once(key: str) -> None:
    if key not in _told and len(_told) < _MAX_TOLD:
        _told.add(key)
        _log.warning("an item's key %r means nothing here, and is passed over from now on", key)
