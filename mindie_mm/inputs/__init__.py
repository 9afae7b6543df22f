"""The `List[Dict]` format of inputs. Inputs are checked once, when a caller passes them.

Each dict has exactly one of the keys `text`, `image`, `video`, `audio`, `document` (a PDF), `image_embeds`,
`video_embeds` and `audio_embeds` (the output of a tower), and `prompt_embeds` (embeddings of text tokens), and may have
options of the item. A media value is a path, bytes, a PIL image, an array, or a `data:`, `http(s):` or `file:` URL. A
PDF must be a path, bytes or a URL. Embeddings are `Embeddings`, an array or tensor, a list of these for several items,
or a path, bytes or URL of a file. A video may also be a list of frames. Each frame is then a media value. Content parts
of OpenAI and Hugging Face chat messages are accepted, too, such as `{"type": "image_url", "image_url": {"url": ...}}`
and `{"type": "image", "image": ...}`.
"""

from __future__ import annotations

from mindie_mm.inputs.chat_messages import parse_messages
from mindie_mm.inputs.checks import require_switches, shown, type_of, whole
from mindie_mm.inputs.embeddings import Embeddings
from mindie_mm.inputs.items import (
    ALL_KINDS,
    CUSTOM_ROLE,
    EMBEDDINGS_KEYS,
    GRID_KEYS,
    KINDS,
    PROMPT,
    ROLES,
    Detail,
    Item,
    Kind,
    KnownPlan,
    Media,
    MediaOptions,
    Message,
    Paths,
    Role,
    Text,
    media_of,
    media_of_messages,
    messages_with_media,
    require_within,
    with_media,
)
from mindie_mm.inputs.options import MediaDefaults, media_defaults, with_defaults
from mindie_mm.inputs.parts import GRID, MAX_LISTED_FRAMES, parse_inputs
from mindie_mm.inputs.prompt_fields import (
    OFF,
    PROMPT_FIELDS,
    refused_fields,
    require_functions,
    require_tools,
    template_variables,
)
from mindie_mm.inputs.webui import read_texts

__all__ = [
    "ALL_KINDS",
    "CUSTOM_ROLE",
    "EMBEDDINGS_KEYS",
    "GRID",
    "GRID_KEYS",
    "KINDS",
    "MAX_LISTED_FRAMES",
    "OFF",
    "PROMPT",
    "PROMPT_FIELDS",
    "ROLES",
    "Detail",
    "Embeddings",
    "Item",
    "Kind",
    "KnownPlan",
    "Media",
    "MediaDefaults",
    "MediaOptions",
    "Message",
    "Paths",
    "Role",
    "Text",
    "media_defaults",
    "media_of",
    "media_of_messages",
    "messages_with_media",
    "parse_inputs",
    "parse_messages",
    "read_texts",
    "refused_fields",
    "require_functions",
    "require_switches",
    "require_tools",
    "require_within",
    "shown",
    "template_variables",
    "type_of",
    "whole",
    "with_defaults",
    "with_media",
]
