"""Inputs that have been checked: texts, media items, and chat messages that contain texts and media items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from mindie_mm.errors import LimitExceeded
from mindie_mm.settings.limits import PromptLimits

Kind = Literal["image", "video", "audio", "prompt"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
"""Kinds of media."""
PROMPT: Kind = "prompt"
"""Kind of an item that consists of embeddings of text tokens (`prompt_embeds`). Unlike media, it needs no tower."""
ALL_KINDS: tuple[Kind, ...] = (*KINDS, PROMPT)
"""All kinds, in the order of their numbers in a block."""
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""Roles of chat messages in OpenAI's API."""
ROLES: tuple[Role, ...] = get_args(Role)
CUSTOM_ROLE = r"[A-Za-z][A-Za-z0-9_.-]{0,63}"
"""Pattern of any other role. It depends on the chat template whether such a role is accepted."""
DOCUMENT = "document"
"""Key of a PDF in a `List[Dict]`."""
EMBEDDINGS_KEYS: Mapping[Kind, str] = {kind: f"{kind}_embeds" for kind in ALL_KINDS}
"""Key of the embeddings in an item, by the kind of the item."""
GRID_KEYS: Mapping[Kind, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}
"""Key of the number of patches along time, height and width, for families whose positions need it."""
Detail = Literal["auto", "low", "high", "original"]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A piece of text. It is tokenized as plain text, so that no part of it becomes a special token."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Preprocessing options of a media item. None means the checkpoint's own setting."""

    min_pixels: int | None = None
    """Minimum number of pixels of the resized image or frame."""
    max_pixels: int | None = None
    """Maximum number of pixels of the resized image or frame."""
    fps: float | None = None
    """Number of frames to sample per second of video. Cannot be combined with `num_frames`."""
    num_frames: int | None = None
    """Number of evenly spaced frames to sample. Cannot be combined with `fps`."""
    min_frames: int | None = None
    """Minimum number of frames to sample. A shorter video has fewer frames."""
    max_frames: int | None = None
    """Maximum number of frames to sample."""
    sample_fps: float | None = None
    """Rate in frames per second at which the caller sampled a list of frames. None if the rate is unknown."""
    detail: Detail | None = None
    """Resolution hint, as in OpenAI's API.

    With `low`, families that can resize images to any size limit an image to 512 x 512 pixels. Other families ignore
    the hint.
    """
    sampling_rate: int | None = None
    """Sampling rate in Hz of an array of audio samples. None means the sampling rate of the model."""
    use_audio_in_video: bool | None = None
    """True if the model also hears the audio of a video. None and False mean that the audio is left out."""


class KnownPlan(msgspec.Struct, frozen=True, array_like=True):
    """The plan of an item that was planned before. It replaces the item's source where only a plan is needed."""

    plan: bytes
    """`Plan` as MessagePack. Only the tokenizer reads it."""
    digest: bytes
    """Digest of the item's content and preprocessing."""


class Media(msgspec.Struct, frozen=True, tag="media"):
    """An image, a video, an audio clip, or embeddings of text tokens."""

    kind: Kind
    source: Any
    """A path, URL, bytes, PIL image, array or Embeddings. Only paths, URLs and bytes can be sent to another process. A
    video can also be a tuple of frames, but not of Embeddings. None if the client sent only a `uuid`. If
    `is_embeddings` is true, the source is a file of embeddings, or a tuple of this file and a file with the grid
    (`GRID_KEYS`)."""
    options: MediaOptions = MediaOptions()
    is_document: bool = False
    """True for a PDF, which becomes one image per page (`Media.page`) before the prompt is made."""
    page: int | None = None
    """Index of the page if the image is a page of the PDF `source`. The first page has index 0. Otherwise None."""
    uuid: str | None = None
    """The client's name for the item. The service keeps the item's data under this name."""
    is_embeddings: bool = False
    """True if the source is a file with the output of a tower (`mindie_mm.media.embeddings`)."""
    is_vllm_item: bool = False
    """True if the source is a file with preprocessed tensors of vLLM (`mindie_mm.nn.vllm_items`)."""
    is_like_vllm: bool = False
    """True if the frames of a video are sampled as in vLLM, in families with `Traits.samples_like_vllm`."""
    cut_s: float | None = None
    """Maximum length in seconds of the clips into which speech is to be cut, before a prompt is made of each clip. 0
    means that only the header is read, for the length of the speech. None for the items of a prompt."""
    known: KnownPlan | None = None
    """Plan of the item, whose source is then None, or None if it is to be planned."""

    def __post_init__(self) -> None:
        if isinstance(self.source, list):  # MessagePack does not distinguish tuples from lists
            msgspec.structs.force_setattr(self, "source", tuple(self.source))

    @property
    def num_listed_frames(self) -> int:
        """Number of frames if the source is a list of frames. Otherwise 0."""
        return len(self.source) if isinstance(self.source, tuple) and not self.is_embeddings else 0

    def part_name(self, index: int) -> str:
        """Return the name of the source's element `index` for error messages."""
        return (EMBEDDINGS_KEYS[self.kind], GRID_KEYS[self.kind])[index] if self.is_embeddings else f"frame {index}"


Item = Text | Media
Paths = Path | list[Path]
"""The file of a media item, or the files of its frames or of its embeddings and their grid."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    """One of `ROLES`, or another role that the chat template accepts."""
    content: str | tuple[Item, ...] | None
    """A string, or items in order. None if the message has no content, for example because it only calls tools."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the message, such as `name` and `tool_calls`. The chat template receives these fields."""


def require_within(media: Sequence[Media], limits: PromptLimits) -> None:
    """Raise LimitExceeded if a prompt with `media` exceeds `limits`."""
    counts = Counter(item.kind for item in media)
    for kind, limit in limits.items():
        if counts[kind] > limit:
            raise LimitExceeded(
                f"the prompt has {counts[kind]} media items of kind {kind}; the limit is {limit} (limit_mm_per_prompt)"
            )


def media_of(items: Sequence[Item]) -> list[Media]:
    """Return the media among `items`, in order."""
    return [item for item in items if isinstance(item, Media)]


def media_of_messages(messages: Sequence[Message]) -> list[Media]:
    """Return the media of `messages`, in order."""
    return [media for m in messages if isinstance(m.content, tuple) for media in media_of(m.content)]


def with_media(items: Sequence[Item], change: Callable[[Media], Media]) -> list[Item]:
    """Return `items` with `change(media)` in place of each media item, in order."""
    return [change(item) if isinstance(item, Media) else item for item in items]


def messages_with_media(messages: Sequence[Message], change: Callable[[Media], Media]) -> list[Message]:
    """Return `messages` with `change(media)` in place of each media item, in order."""
    return [
        replace(message, content=tuple(with_media(message.content, change)))
        if isinstance(message.content, tuple)
        else message
        for message in messages
    ]
