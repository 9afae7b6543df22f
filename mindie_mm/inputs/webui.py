"""Parsing of images in texts, in the format of text-generation-webui, and detection of long data: URLs in texts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs.checks import require_unicode
from mindie_mm.inputs.items import Item, Media, Message, Text

Part = TypeVar("Part", Item, Message)

_log = logging.getLogger(__name__)

# The quantifiers are possessive, so that the patterns do not backtrack in long texts.
_IMAGE = re.compile(
    r'<img src="(data:image/(?:jpeg|png|webp|gif);base64,\s*+[A-Za-z0-9+/=][A-Za-z0-9+/=\s]*+)">', re.ASCII
)
_DATA_URL = re.compile(
    r"\bdata:(?:[\w.+-]{1,64}+/[\w.+-]{1,128}+)?+(?:;[^\s,;\"'<>]{0,128}+){0,8}+,"
    r"\s{0,2}+[!#-&(-;=?-~]++(?:\s{1,2}+[A-Za-z0-9+/=]{16,}+)*+",  # characters of a URL, or lines of base64
    re.ASCII,
)
MAX_DATA_URL = 1000
"""Maximum number of characters of a data: URL that is taken for ordinary text, such as a URL in source code."""
_MAX_STARTS = 10_000
"""Maximum number of places with the text `data:` that are examined. Each takes about a microsecond."""
_warned: set[str] = set()


class _Images:
    """A parser of the images in the texts of one prompt."""

    def __init__(self, max_images: int | None) -> None:
        self._max_images = max_images
        self._num_images = 0

    def of_items(self, items: Iterable[Item]) -> list[Item]:
        """Return `items` with each text replaced by its images and the text between them."""
        return [part for item in items for part in (self._of_text(item.text) if isinstance(item, Text) else [item])]

    def of_message(self, message: Message) -> Message:
        """Return a message whose texts are replaced as in `of_items`. A message without images is not changed."""
        content = message.content
        before = self._num_images
        items = self.of_items([Text(content)] if isinstance(content, str) else content or ())
        return message if self._num_images == before else replace(message, content=tuple(items))

    def _of_text(self, text: str) -> list[Item]:
        items: list[Item] = []
        stop = 0
        for match in _IMAGE.finditer(text):
            if self._num_images == self._max_images:
                raise LimitExceeded(f"the prompt has more images than the limit of {self._max_images}")
            self._num_images += 1
            items += [Text(require_unicode(text[stop : match.start()], "the prompt")), Media("image", match[1])]
            stop = match.end()
        items.append(Text(require_unicode(text[stop:], "the prompt")))
        return [item for item in items if item != Text("")] if stop else items


def read_texts(
    prompt: Sequence[Part], *, webui: bool, max_images: int | None = None, refuses_urls: bool = False
) -> list[Part]:
    """Return the items or messages of a prompt, with the images in their texts if `webui` is set.

    An image is written as `<img src="data:image/jpeg;base64,...">`, in exactly this spelling, or with png, webp or gif
    in place of jpeg. The base64 may contain white space, and is not decoded. Everything else stays text.

    Args:
        prompt: All items or all messages of the prompt.
        webui: Whether texts may contain images in the format of text-generation-webui.
        max_images: Maximum number of images in the texts, or None for no limit.
        refuses_urls: Whether a long data: URL in text is an error. If not, it causes a warning, once.

    Raises:
        LimitExceeded: The texts have more than `max_images` images.
        InputError: The text has a long data: URL, or an unpaired surrogate beside an image.

    """
    read: list[Any] = [] if webui else [*prompt]
    if webui:
        images = _Images(max_images)
        for part in prompt:
            read += [images.of_message(part)] if isinstance(part, Message) else images.of_items([part])
    if (found := long_data_url(read)) is None:
        return read
    if refuses_urls:
        raise InputError(
            f'{found}. Send the media as an item, such as {{"type": "image_url", "image_url": {{"url": "data:..."}}}}. '
            'Images of the form <img src="data:image/jpeg;base64,..."> are read in a prompt that is one text, and '
            "with --webui-images also in messages and items"
        )
    if not _warned:
        _warned.add(found)
        _log.warning(
            "%s. Give the media as an item, or set webui=True (--webui-images) for texts in the format of "
            "text-generation-webui; "
            "this warning is not repeated",
            found,
        )
    return read


def long_data_url(prompt: Iterable[Item | Message]) -> str | None:
    """Describe the first data: URL of more than `MAX_DATA_URL` characters, or return None if there is none."""
    starts = ((text, at) for text in _texts(prompt) if len(text) > MAX_DATA_URL for at in _starts(text))
    for text, at in islice(starts, _MAX_STARTS):
        match = _DATA_URL.match(text, at)
        if match and (length := len(match[0])) > MAX_DATA_URL:
            return (
                f"the text has a data: URL of {length} characters, which the model would read as text; the limit is "
                f"{MAX_DATA_URL}"
            )
    return None


def _starts(text: str) -> Iterator[int]:
    at = -1
    while (at := text.find("data:", at + 1)) >= 0:
        yield at


def _texts(prompt: Iterable[Item | Message]) -> Iterator[str]:
    for one in prompt:
        if isinstance(one, Text):
            yield one.text
        elif isinstance(one, Message):
            yield from [one.content] if isinstance(one.content, str) else _texts(one.content or ())
