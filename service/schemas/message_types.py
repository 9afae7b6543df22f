"""Types of messages and items for the OpenAPI description. `mindie_mm.inputs` validates them."""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from mindie_mm.inputs import CUSTOM_ROLE, Detail


class ItemOptions(TypedDict, total=False):
    """Options for reading an image, a video or a sound. Each kind of media accepts some of the options."""

    min_pixels: int | None
    max_pixels: int | None
    fps: float | None
    num_frames: int | None
    min_frames: int | None
    max_frames: int | None
    sample_fps: float | None
    detail: Detail | None
    sampling_rate: int | None


class Address(ItemOptions, total=False):
    """The URL of a media item (http:, https:, data: or file:) or its path. A list contains the frames of a video."""

    url: Required[str | list[str]]


class InputAudio(TypedDict, total=False):
    """A sound in OpenAI's format."""

    data: Required[str]
    """Base64, a URL or a path."""
    format: str | None


class File(TypedDict, total=False):
    """A text file or a PDF in OpenAI's format."""

    file_data: Required[str]
    """Content of the file, as a data: URL or as base64."""
    filename: str | None


class Item(ItemOptions, total=False):
    """One text, image, video or sound, in this service's format or in the format of chats."""

    type: str | None
    text: str | None
    refusal: str | None
    image: str | Address | None
    image_url: str | Address | None
    video: str | list[str] | Address | None
    video_url: str | list[str] | Address | None
    audio: str | Address | None
    audio_url: str | Address | None
    input_audio: str | InputAudio | None
    file: File | None
    document: str | Address | None
    """A PDF, whose pages become images."""
    url: str | list[str] | None
    """Address of the item. `url`, `path` and `base64` require `type`, which says what kind of item it is."""
    path: str | list[str] | None
    base64: str | list[str] | None


class Message(TypedDict, total=False):
    """One message of a chat. All further fields are passed to the chat template."""

    role: Required[Annotated[str, Field(pattern=f"^{CUSTOM_ROLE}$")]]
    """system, developer, user, assistant, tool, function, or another role that the chat template supports."""
    content: str | list[Item] | None


class _DescribedAs:
    """An annotation that sets the type of a field in the OpenAPI description. Validation ignores this type."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self._kind).core_schema)


AnyMessage = Annotated[dict[str, Any], _DescribedAs(Message)]
AnyItem = Annotated[dict[str, Any], _DescribedAs(Item)]
