"""Messages between the tokenizer process, its decoder processes and the nursery, encoded as msgpack.

A decoder answers `PlanItem` with a `Planned`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from mindie_mm.decode.parcel import Parcel
from mindie_mm.decode.scratch import Layout
from mindie_mm.media.guard.caps import VideoSample
from mindie_mm.nn.family import Plan
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import MediaCaps


class DecoderSetup(msgspec.Struct, frozen=True):
    """Settings of the decoder processes. The nursery receives them as JSON."""

    model: str
    """Directory of the checkpoint."""
    family: str | None
    media: MediaCaps


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Nursery to tokenizer process: the nursery can fork decoders. If loading fails, it sends a Failure instead."""


class PlanItem(msgspec.Struct, frozen=True, tag="plan"):
    """Tokenizer process to decoder: read and plan an item. The decoder keeps the plan until the next message.

    The message carries the descriptor of the parcel's file.
    """

    item: Parcel


class Planned(Plan, frozen=True, tag="planned"):
    """Decoder to tokenizer process: the plan of a family, and what planning has read of the item."""

    image_pixels: Annotated[int, msgspec.Meta(ge=0)] = 0
    """`Work.image_pixels` of this item alone."""
    video_pixels: Annotated[int, msgspec.Meta(ge=0)] = 0
    """`Work.video_pixels` of this item alone."""
    is_rgb: bool = True
    """`Work.is_rgb` of this item alone."""
    sample: VideoSample | None = None
    """`Work.sample` of this item alone."""
    num_pages: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0
    """Number of pages of the document if the item is one of its pages."""
    by_counts: bool = False
    """True if the plan may depend on the number of items of the prompt."""


class WriteItem(msgspec.Struct, frozen=True, tag="write"):
    """Tokenizer process to decoder: decode an item to the scratch memory."""

    layout: Layout
    """Layout of the item's arrays in the scratch memory."""
    item: Parcel | None
    """Item to decode, whose descriptor the message carries. None means the item that the decoder planned last."""


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Decoder to tokenizer process: the arrays are in the scratch memory."""


MAX_FRAMES = 10_000
"""Maximum length of a traceback in characters, because a compromised decoder could fill the log."""


class DecoderFailure(Failure, frozen=True, tag="failed"):
    """An error that a decoder may report. Other errors would cause retries, or would blame other processes."""

    name: Literal["InputError", "MediaError", "Miscounted", "LimitExceeded", "OperationalError"]
    message: Annotated[str, msgspec.Meta(max_length=10_000)]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Decoder to tokenizer process: planning or decoding the item has failed."""

    error: DecoderFailure
    frames: Annotated[str, msgspec.Meta(max_length=MAX_FRAMES)] = ""
    """Traceback of an unexpected exception, for the log. Empty for other errors."""


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Tokenizer process to nursery: fork a decoder.

    The message carries two descriptors: the decoder's socket and the file of its scratch memory.
    """


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Tokenizer process to nursery: kill a decoder if it is running."""

    pid: int


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """Nursery to tokenizer process: a decoder is running. The nursery answers `Fork` messages in order."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Nursery to tokenizer process: a decoder has exited."""

    pid: int
    status: int
    """Exit status, or the negated signal number."""
    grown_bytes: int
    """Maximum resident memory of the decoder, less the memory that it had when it was forked."""


ToDecoder = PlanItem | WriteItem
FromDecoder = Planned | Written | Refused
ToNursery = Fork | Kill
FromNursery = Forked | Ended
