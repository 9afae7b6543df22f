"""Parsing of images in texts, in the format of text-generation-webui, and detection of long data: URLs in texts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs.checks import require_unicode
from mindie_mm.inputs.items import Item, Media, Message, Text

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


class WebuiImages:
    """A parser of texts with images, in the format of text-generation-webui.

    An image is written as `<img src="data:image/jpeg;base64,...">`, in exactly this spelling, or with png, webp or gif
    in place of jpeg. The base64 may contain white space, and is not decoded. Everything else stays text.
    """

    def __init__(self, max_images: int | None = None) -> None:
        """Create a parser of the texts of one prompt. It raises LimitExceeded at more than `max_images` images."""
        self._max_images = max_images
        self._num_images = 0

    def of_text(self, text: str) -> list[Item]:
        """Return the images and the text between them, in order. Raise InputError for an unpaired surrogate."""
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

    def of_items(self, items: Iterable[Item]) -> list[Item]:
        """Return `items` with each text replaced by its images and the text between them."""
        return [part for item in items for part in (self.of_text(item.text) if isinstance(item, Text) else [item])]

    def of_messages(self, messages: Iterable[Message]) -> list[Message]:
        """Return `messages` with their texts replaced as in `of_items`. A message without images is not changed."""
        return [self._of_message(message) for message in messages]

    def _of_message(self, message: Message) -> Message:
        content = message.content
        before = self._num_images
        items = self.of_items([Text(content)] if isinstance(content, str) else content or ())
        return message if self._num_images == before else replace(message, content=tuple(items))


def long_data_url(prompt: Iterable[Item | Message]) -> str | None:
    """Describe the first data: URL of more than `MAX_DATA_URL` characters in the texts. Without one, return None."""
    starts = ((text, at) for text in _texts(prompt) if len(text) > MAX_DATA_URL for at in _starts(text))
    for text, at in islice(starts, _MAX_STARTS):
        match = _DATA_URL.match(text, at)
        if match and (length := len(match[0])) > MAX_DATA_URL:
            return (
                f"a text has a data: URL of {length} characters, which the model would read as text; the limit is "
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


def webui_items(items: Sequence[Item], *, webui: bool) -> Sequence[Item]:
    """Return `items`, with the images in their texts if `webui` is set. Warn about a long data: URL in a text."""
    items = WebuiImages().of_items(items) if webui else items
    _warn(items)
    return items


def webui_messages(messages: Sequence[Message], *, webui: bool) -> Sequence[Message]:
    """Process the texts of messages as `webui_items` processes the texts of items."""
    messages = WebuiImages().of_messages(messages) if webui else messages
    _warn(messages)
    return messages


def _warn(prompt: Iterable[Item | Message]) -> None:
    if (found := long_data_url(prompt)) and not _warned:
        _warned.add(found)
        _log.warning(
            "%s. Give the media as an item, or set webui=True (--webui-images) for texts in the format of "
            "text-generation-webui; "
            "this warning is not repeated",
            found,
        )
