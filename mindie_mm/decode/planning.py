"""Planning of a media item within the limits on media."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mindie_mm.errors import InputError
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.document.pdf import PdfPage
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.nn.family import Plan, Processor
from mindie_mm.settings.config import MediaCaps


def plan_item(processor: Processor, media: Media, data: Data, counts: Mapping[Kind, int], caps: MediaCaps) -> Plan:
    """Return the plan of the item `media` with the source `data`. Call this function inside `under(caps)`.

    Raises:
        InputError, MediaError, LimitExceeded: In the same cases as `Processor.plan`.

    """
    plan = under_caps(processor.plan(media, data, counts), caps)
    return replace(plan, settings=f"{plan.settings}, {data.settings}") if isinstance(data, PdfPage) else plan


def page_of(media: Media, data: Data) -> Data:
    """Return the page of the PDF `data` that `media` refers to. If `media` does not refer to a page, return `data`.

    Raises:
        InputError: `data` are pixels instead of the bytes of a PDF.
        MediaError: In the same cases as `PdfPage.open`.

    """
    if media.page is None:
        return data
    if not isinstance(data, bytes):
        raise InputError("a document is given as pixels; it must be the bytes of a PDF")
    return PdfPage.open(data, media.page)


def under_caps(plan: Plan, caps: MediaCaps) -> Plan:
    """Return `plan` with a `write` function that applies the limits of `caps`.

    The limits must apply to `write`, too, because it opens encoded images again if they are the frames of a video. If
    the background color is not the default, it becomes part of `Plan.settings`, because it changes the arrays.
    """
    counted = replace(caps, max_request_pixels=sys.maxsize)  # planning has already counted all pixels

    def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        with under(counted):
            plan.write(arrays)

    background = tuple(caps.rgba_background_color)
    is_usual = background == MediaCaps().rgba_background_color
    return replace(plan, write=write, settings=plan.settings if is_usual else f"{plan.settings}, on {background}")
