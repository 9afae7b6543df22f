"""Handling of unknown keys in items, in chat messages and their content parts, and in requests.

Clients send keys of other servers, such as `id`, `annotations` or an image's `format`. These keys are ignored, with one
warning per key. A key that may be meant to change how the item is read is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping

from mindie_mm.errors import InputError
from mindie_mm.inputs.items import MediaOptions

_log = logging.getLogger(__name__)

OTHERS_OPTIONS = frozenset(
    {
        # qwen-vl-utils, DashScope
        *("nframes", "resized_height", "resized_width", "total_pixels", "video_start", "video_end"),
        # Clips, crops and rates
        *("start_time", "end_time", "start_offset", "end_offset", "speed", "crop"),
        *("sample_rate", "frame_rate", "framerate"),
        # Gemini, transformers, vLLM
        *("video_metadata", "frames", "do_sample_frames", "frames_indices", "media_resolution"),
        # SGLang, LMDeploy, InternVL, MiniCPM
        *("max_dynamic_patch", "min_dynamic_patch", "max_num", "max_slice_nums", "use_image_id"),
        # Other sources, or features in place of a source
        *("url", "path", "base64", "data", "bytes", "file", "file_id", "file_data", "embeds", "image_embeds"),
        *("audio_embeds", "precomputed_embeddings"),
    }
)
"""Names of options and sources in other servers and libraries. Ignoring one of them would change the prompt."""
MESSAGE_KEYS = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations"),
        *("reasoning", "reasoning_content"),
    }
)
"""Keys of OpenAI's messages, and the keys in which servers return reasoning."""
_MAX_WARNED = 256
"""Maximum number of keys to warn about, because clients may send any number of different keys."""
_MAX_SHOWN = 40
_MIN_SHORTENED = 6
_warned: set[tuple[str, str]] = set()


def pass_over(
    keys: Iterable[object], where: str, takes: str, *, strict: bool, foreign: Collection[str] = OTHERS_OPTIONS
) -> None:
    """Ignore the unknown `keys` of an item, with a warning for the first occurrence of each key. Refuse some keys.

    Args:
        keys: Unknown keys of the item.
        where: Name of the item in error messages.
        takes: End of the error message, which describes the keys that the item may have.
        strict: Whether to refuse every unknown key.
        foreign: Further keys to refuse, because other servers use them as options.

    Raises:
        InputError: A key is refused. Without `strict`, only three kinds of keys are refused: options of another kind of
            item, keys that resemble an option, and keys in `foreign`.

    """
    for key in map(str, keys):
        near = _near(key)
        if strict or near or key in foreign:
            hint = f"; did you mean {near!r}?" if near and near != key else ""
            raise InputError(f"{where} has the unknown key {key[:_MAX_SHOWN]!r}{hint}; {takes}")
        warn_once(key, "an item")


def require_known_keys(keys: Iterable[str], where: str) -> None:
    """Raise InputError if one of the `keys` of a message is not in `MESSAGE_KEYS`."""
    for key in keys:
        if key not in MESSAGE_KEYS:
            known = ", ".join(sorted(MESSAGE_KEYS))
            raise InputError(f"{where} has the unknown key {key[:_MAX_SHOWN]!r}; a message may have the keys {known}")


def warn_once(key: str, owner: str) -> None:
    """Log that an unknown key is ignored. `owner`, such as "an item", has the key. Log each key once per owner."""
    key = key[:_MAX_SHOWN]
    if (key, owner) not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add((key, owner))
        _log.warning("ignoring the unknown key %r of %s; this warning is not repeated", key, owner)


def _near(key: str) -> str | None:
    """Return the option that equals `key` or differs from it by one typing error. Return None if there is none.

    A typing error is one letter that is added, missing or replaced, or two adjacent letters that are swapped.
    """
    if len(key) > _MAX_SHOWN:
        return None
    letters = _letters(key)
    return next((_SPELLED[one] for one in (letters, *_shortened(letters)) if one in _SPELLED), None)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _shortened(letters: str) -> list[str]:
    """Return all strings that result from removing one letter from `letters`.

    Return an empty list for short names, because too many keys resemble them.
    """
    return [letters[:i] + letters[i + 1 :] for i in range(len(letters))] if len(letters) >= _MIN_SHORTENED else []


# Two names that differ in one letter become equal when this letter is left out of both.
_SPELLED: Mapping[str, str] = {
    spelled: name for name in MediaOptions.__slots__ for spelled in (*_shortened(_letters(name)), _letters(name))
}
