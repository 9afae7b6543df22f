"""Parsing of the prompts of text-generation-webui, which are texts with embedded images."""

from __future__ import annotations

import re

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs.checks import require_unicode
from mindie_mm.inputs.items import Item, Media, Text

# The quantifiers are possessive, so that a long text without the closing quote fails to match without backtracking.
_IMAGE = re.compile(r'<img src="(data:image/jpeg;base64,\s*+[A-Za-z0-9+/=][A-Za-z0-9+/=\s]*+)">', re.ASCII)


def from_webui_prompt(prompt: str, max_images: int) -> list[Item]:
    """Parse a prompt of text-generation-webui into items.

    An image is written as `<img src="data:image/jpeg;base64,...">`, in exactly this spelling. The base64 may contain
    white space. Everything else is text. This function does not decode the base64.

    Raises:
        InputError: A text contains a lone surrogate.
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
