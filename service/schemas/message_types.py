"""Types of messages, items and tools for the OpenAPI description. `mindie_mm.inputs` and `ToolUse` validate them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from mindie_mm.inputs import CUSTOM_ROLE, Detail
from mindie_mm.tool_calls.scanner import MAX_NAME


class ItemOptions(TypedDict, total=False):
    """Options for reading an image, a video or an audio clip. Each kind of media accepts some of the options."""

    min_pixels: int | None
    max_pixels: int | None
    fps: float | None
    num_frames: int | None
    min_frames: int | None
    max_frames: int | None
    sample_fps: float | None
    detail: Detail | None
    sampling_rate: int | None
    use_audio_in_video: bool | None


class Address(ItemOptions, total=False):
    """The URL of a media item (http:, https:, data: or file:) or its path. A list contains the frames of a video."""

    url: str | list[str] | None
    """Left out only if the item has a `uuid`."""


class InputAudio(TypedDict, total=False):
    """An audio clip in OpenAI's format."""

    data: str | None
    """Base64 or an address. Left out only if the item has a `uuid`."""
    format: str | None


class File(TypedDict, total=False):
    """A text file or a PDF in OpenAI's format."""

    file_data: Required[str]
    """Content of the file, as a data: URL or as base64."""
    filename: str | None


class ImageEmbeds(TypedDict, total=False):
    """Embeddings of an image, for models whose positions depend on the number of patches."""

    image_embeds: str | None
    image_grid_thw: str | None
    """Base64 of a file with an integer tensor of 3 elements, like that of `image_embeds`."""


class VideoEmbeds(TypedDict, total=False):
    """Embeddings of a video, for models whose positions depend on the number of patches."""

    video_embeds: str | None
    video_grid_thw: str | None
    """Base64 of a file with an integer tensor of 3 elements, and further elements for some models."""


class AudioEmbeds(TypedDict, total=False):
    """Embeddings of an audio clip."""

    audio_embeds: str | None


class Item(ItemOptions, total=False):
    """One text, image, video or audio clip, in this service's format or in the format of chats."""

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
    image_embeds: str | ImageEmbeds | None
    """Base64 of safetensors or of the output of torch.save, with one tensor. Requires --enable-mm-embeds."""
    video_embeds: str | VideoEmbeds | None
    audio_embeds: str | AudioEmbeds | None
    prompt_embeds: str | None
    """Base64 of embeddings of text tokens, in place of text. Requires --enable-prompt-embeds."""
    data: str | None
    """Base64 of the embeddings if `type` is `prompt_embeds`, as in vLLM."""
    url: str | list[str] | None
    """Address of the item. `url`, `path` and `base64` require `type`, which says what kind of item it is."""
    path: str | list[str] | None
    base64: str | list[str] | None
    uuid: str | None
    """Client's name for an image, a video or an audio clip. Later requests may leave out the data."""


class Message(TypedDict, total=False):
    """One message of a chat. All further fields are passed to the chat template."""

    role: Required[Annotated[str, Field(pattern=f"^{CUSTOM_ROLE}$")]]
    """system, developer, user, assistant, tool, function, or another role that the chat template supports."""
    content: str | list[Item] | None


class Function(TypedDict, total=False):
    """A function that the model may call."""

    name: Required[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]]
    description: str | None
    parameters: dict[str, Any] | None
    """JSON schema of the arguments, an object."""
    strict: bool | None
    """True if the arguments must be valid even when the model decides itself to call the function."""


class Tool(TypedDict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(TypedDict):
    """The name of a function."""

    name: str


class NamedTool(TypedDict, total=False):
    """The tool that the model has to call. Some other forms are also accepted."""

    type: Literal["function", "tool"]
    function: Required[FunctionName]


class _DescribedAs:
    """An annotation that sets the type of a field in the OpenAPI description. Validation ignores this type."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self._kind).core_schema)


AnyMessage = Annotated[dict[str, Any], _DescribedAs(Message)]
AnyTool = Annotated[dict[str, Any], _DescribedAs(Tool)]
AnyFunction = Annotated[dict[str, Any], _DescribedAs(Function)]
AnyToolChoice = Annotated[Any, _DescribedAs(Literal["auto", "none", "required", "any"] | NamedTool | None)]
AnyFunctionChoice = Annotated[Any, _DescribedAs(Literal["auto", "none"] | FunctionName | None)]
AnyItem = Annotated[dict[str, Any], _DescribedAs(Item)]
