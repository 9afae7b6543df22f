"""Prompts of text-generation-webui, which are texts with embedded images."""

from __future__ import annotations

import re

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs.checks import require_unicode
from mindie_mm.inputs.items import Item, Media, Text

# Possessive quantifiers, so that a long run without its end fails without backtracking.
_IMAGE = re.compile(r'<img src="(data:image/jpeg;base64,\s*+[A-Za-z0-9+/=][A-Za-z0-9+/=\s]*+)">', re.ASCII)


def from_webui_prompt(prompt: str, max_images: int) -> list[Item]:
    """Parse a prompt of text-generation-webui into items.

    `<img src="data:image/jpeg;base64,...">`, in exactly this spelling, is an image. White space in the base64 is
    allowed. Everything else is text. The base64 is not decoded here.

    Raises:
        InputError: A text is not valid Unicode.
        LimitExceeded: There are more than `max_images` images.

    """
    items: list[Item] = []
    stop = 0
    for index, match in enumerate(_IMAGE.finditer(prompt)):
        if index == max_images:
            raise LimitExceeded(f"the prompt has more images than the limit of {max_images}")
        items += [Text(require_unicode(prompt[stop : match.start()], "the prompt")), Media("image", match[1])]
        stop = match.end()
    items.append(Text(require_unicode(prompt[stop:], "the prompt")))
    return [item for item in items if item != Text("")]
