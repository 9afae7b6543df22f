"""Planning of media items, and enforcement of the limits in `MediaCaps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from mindie_mm.decode.decoder_messages import Planned
from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import EMBEDDINGS_KEYS, GRID, GRID_KEYS, KINDS, PROMPT, Embeddings, Kind, Media
from mindie_mm.media.audio.cuts import SAMPLES, SPEECH_RATE, cuts
from mindie_mm.media.audio.encoded_audio import EncodedAudio, open_audio
from mindie_mm.media.document.pages import DocumentPage, page_of_document
from mindie_mm.media.embeddings import read_embeddings
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.nn.family import Plan, Processor, Write
from mindie_mm.nn.model_inputs import EMBEDDINGS
from mindie_mm.settings.config import MediaCaps
from mindie_mm.shm import ArraySpec

_DEFAULTS = MediaCaps()


def plan_item(
    processor: Processor, media: Media, data: Data | Embeddings, counts: Mapping[Kind, int], caps: MediaCaps
) -> tuple[Planned, Write]:
    """Return the plan of the item `media` with the source `data`, and the function that writes its arrays.

    The limits of `caps` apply to planning. The caller applies them to writing, too, because writing opens images again
    if they are the frames of a video.

    Raises:
        InputError: The item is invalid, or is a page of a document that is given as pixels.
        MediaError, LimitExceeded: In the same cases as `page_of_document` and `Processor.plan`.

    """
    noted = _NotedCounts(counts)
    with under(caps) as work:
        if isinstance(data, Embeddings):
            plan, write = _plan_embeddings(processor, media.kind, data)
        else:
            if media.page is not None:
                data = _page(data, media.page)
            plan, write = _plan_data(processor, media, data, noted)
    settings, num_pages = plan.settings, 0
    # Settings that change the arrays, unless they are the default.
    if (background := tuple(caps.rgba_background_color)) != _DEFAULTS.rgba_background_color:
        settings = f"{settings}, on {background}"
    if caps.hdr_to_sdr != _DEFAULTS.hdr_to_sdr:
        settings = f"{settings}, hdr_to_sdr {caps.hdr_to_sdr}"
    if isinstance(data, DocumentPage):
        settings, num_pages = f"{settings}, {data.settings}", data.num_pages
    planned = Planned(
        **{**msgspec.structs.asdict(plan), "settings": settings},
        num_pages=num_pages,
        image_pixels=work.image_pixels,
        video_pixels=work.video_pixels,
        is_rgb=work.is_rgb,
        by_counts=noted.are_read,
        sample=work.sample,
    )
    return planned, write


class _NotedCounts(Mapping[Kind, int]):
    """Numbers of items that note whether a family reads them."""

    def __init__(self, counts: Mapping[Kind, int]) -> None:
        self._counts = counts
        self.are_read = False

    def __getitem__(self, kind: Kind) -> int:
        self.are_read = True
        return self._counts[kind]

    def __iter__(self) -> Iterator[Kind]:
        self.are_read = True
        return iter(self._counts)

    def __len__(self) -> int:
        self.are_read = True
        return len(self._counts)


def _page(data: Data, index: int) -> DocumentPage:
    if not isinstance(data, bytes):
        raise InputError("a document is given as pixels; it must be the bytes of a PDF or TIFF")
    return page_of_document(data, index)


def _plan_data(processor: Processor, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
    if media.cut_s is not None:
        return _plan_cuts(data, media.cut_s)
    if media.is_vllm_item:
        return _plan_vllm_item(processor, media.kind, data)
    if not media.is_embeddings:
        return processor.plan(media, data, counts)
    embeddings = read_embeddings(data, GRID_KEYS.get(media.kind, GRID))
    if media.kind != PROMPT and (rows := len(embeddings.array)) > (most := processor.max_tokens(media.kind)):
        raise LimitExceeded(f"the embeddings have {rows} rows; the limit of this model is {most}")
    return _plan_embeddings(processor, media.kind, embeddings, in_file=True)


def _plan_vllm_item(processor: Processor, kind: Kind, data: Data) -> tuple[Plan, Write]:
    """Return a plan for preprocessed tensors of vLLM, whose block is the same as that of the media themselves."""
    if (layout := processor.vllm_items.get(kind)) is None:
        raise InputError(f"vLLM's tensors of the kind {kind} are not supported for this model")
    assert isinstance(data, bytes), "only files are items of vLLM"
    item = layout.read(data)
    num_features, grid = processor.vllm_shape(kind, item.stated)
    if processor.spelling(kind, num_features, grid) is None:
        raise InputError(f"the tensors have the sizes {item.stated}; this model has no {kind} with these sizes")
    if num_features > (most := processor.max_tokens(kind)):
        raise LimitExceeded(f"the {kind} has {num_features} features; the limit of this model is {most}")
    specs = processor.specs_of(kind, grid)
    assert specs is not None, "the arrays of these items follow from their grid"
    write: Write = partial(layout.write, item)  # type: ignore[arg-type]  # the layout has read the item
    return Plan(num_features, specs, f"vLLM's {type(layout).__name__}", grid), write


def _plan_cuts(data: Data, window_s: float) -> tuple[Plan, Write]:
    """Return a plan whose only array has the samples of speech, and whose grid has the cuts between its clips.

    If `window_s` is 0, nothing is decoded, and the length of the array follows from the header.
    """
    encoded = open_audio(data, counts=False)
    assert isinstance(encoded, EncodedAudio), "the service cuts only files"
    if not window_s:
        spec = ArraySpec((encoded.stated_samples(SPEECH_RATE),), "int16")
        return Plan(1, {SAMPLES: spec}, "length of speech", ()), _write_nothing
    samples = encoded.speech(SPEECH_RATE)

    def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        arrays[SAMPLES][...] = samples

    specs = {SAMPLES: ArraySpec(samples.shape, "int16")}
    return Plan(1, specs, f"speech in clips of {window_s} s", tuple(cuts(samples, window_s))), write


def _write_nothing(_: Mapping[str, np.ndarray[Any, Any]]) -> None:
    raise AssertionError("a header has no samples")


def _plan_embeddings(
    processor: Processor, kind: Kind, source: Embeddings, *, in_file: bool = False
) -> tuple[Plan, Write]:
    """Return a plan for features that the caller passes instead of media. The engine runs no tower for them.

    Args:
        processor: Processor of the model.
        kind: Kind of the item.
        source: Features of one item.
        in_file: Whether the features come from a file, beside which only a grid of `GRID_KEYS` can be given.

    Raises:
        InputError: The width, number or grid of the features does not fit the model.

    """
    array = np.ascontiguousarray(source.array)
    num_features, width = array.shape
    if width != (expected := processor.feature_width - (processor.extra_width if kind == PROMPT else 0)):
        raise InputError(f"the embeddings have width {width}; the model needs {expected}")
    if kind == PROMPT and source.grid:
        raise InputError(
            f"embeddings of text tokens have the grid {source.grid}, but only media have a grid; leave it out, or pass "
            f"the output of a tower under one of the keys {', '.join(EMBEDDINGS_KEYS[kind] for kind in KINDS)}"
        )
    grid = () if kind == PROMPT else _grid(processor, kind, num_features, source.grid, in_file=in_file)
    if kind != PROMPT and processor.spelling(kind, num_features, grid) is None:
        meaning = processor.traits.grids.get(kind)
        advice = f". The grid is {meaning}" if meaning else "; leave the grid out" if source.grid else ""
        raise InputError(
            f"the embeddings have {num_features} features and the grid {grid}; this model has no {kind} with "
            f"this combination{advice}"
        )

    def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        arrays[EMBEDDINGS][...] = array

    spec = ArraySpec(array.shape, str(array.dtype))
    noun = f"{kind} embeddings" if kind == PROMPT else "embeddings"
    return Plan(num_features, {EMBEDDINGS: spec}, f"{noun} {spec} {grid}", grid), write


def _grid(
    processor: Processor, kind: Kind, num_features: int, given: tuple[int, ...], *, in_file: bool
) -> tuple[int, ...]:
    """Return the grid of embeddings. Raise InputError if it is not given and does not follow from their number."""
    has_thw = processor.traits.has_grid_thw and kind in GRID_KEYS
    if given and in_file and not has_thw:
        raise InputError(f"{GRID_KEYS[kind]} is given, but the model does not use it; leave it out")
    grid = given or processor.grid_of(kind, num_features)
    meaning = processor.traits.grids.get(kind)
    if grid is not None or meaning is None:
        return grid or ()
    if in_file and not has_thw:
        raise InputError(
            f"embeddings of the kind {kind} in a file are not supported for this model, because it needs more than "
            f"their rows: {meaning}. Send the {kind} itself, or pass the array and its grid in Python"
        )
    own, key = EMBEDDINGS_KEYS[kind], GRID_KEYS[kind] if has_thw else GRID
    form = f'{{"{own}": ..., "{key}": ...}}'
    if in_file:
        form = f'{{"{own}": {form}}}'
    raise InputError(f"this model needs {key}, {meaning}, in addition to the embeddings of the {kind}; send {form}")
