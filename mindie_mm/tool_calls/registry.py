"""Lists the tool-call formats, and chooses the format of a checkpoint.

Other packages can add formats: subclasses of `ToolCallParser` that are entry points in the group
`mindie_mm.tool_call_parsers`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.tokenize.text.chat_traits import ChatTraits
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.parsers.dsml import DeepSeekV4Parser, DeepSeekV32Parser, DeepSeekV41Parser
from mindie_mm.tool_calls.parsers.gemma4 import FunctionGemmaParser, Gemma4Parser
from mindie_mm.tool_calls.parsers.json_objects import (
    Granite20bFcParser,
    GraniteParser,
    HermesParser,
    InternLMParser,
    Llama3JsonParser,
    Phi4Parser,
)
from mindie_mm.tool_calls.parsers.named_json import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    KimiK2Parser,
    MistralParser,
    MistralV3Parser,
)
from mindie_mm.tool_calls.parsers.python_syntax import Lfm2Parser, PythonicParser
from mindie_mm.tool_calls.parsers.tagged import Glm45Parser, Glm47Parser, MiniCPM5Parser, Qwen3CoderParser
from mindie_mm.tool_calls.response_template import ResponseTemplateParser

_log = logging.getLogger(__name__)

GROUP = "mindie_mm.tool_call_parsers"

FORMATS: Mapping[str, type[ToolCallParser]] = {
    "gemma4": Gemma4Parser,  # Gemma 4
    "functiongemma": FunctionGemmaParser,  # FunctionGemma
    "kimi_k2": KimiK2Parser,  # Kimi K2 to K2.6
    "mistral": MistralParser,  # tokenizer version 11 and later: Mistral Small 3.2, Ministral 3, Magistral
    "mistral_v3": MistralV3Parser,  # tokenizer version 3: Mistral 7B v0.3, Pixtral
    "deepseek_v41": DeepSeekV41Parser,  # DeepSeek V4.1
    "deepseek_v4": DeepSeekV4Parser,  # DeepSeek V4
    "deepseek_v32": DeepSeekV32Parser,  # DeepSeek V3.2
    "deepseek_v3": DeepSeekV3Parser,  # DeepSeek V3, R1
    "deepseek_v31": DeepSeekV31Parser,  # DeepSeek V3.1
    "glm47": Glm47Parser,  # GLM-4.7, GLM-5
    "glm45": Glm45Parser,  # GLM-4.5, GLM-4.6V
    "qwen3_coder": Qwen3CoderParser,  # Qwen3-Coder, Qwen3.5 and later
    "minicpm5": MiniCPM5Parser,  # MiniCPM5
    "internlm": InternLMParser,  # InternLM2, and InternVL models based on it
    "phi4": Phi4Parser,  # Phi-4-mini, Phi-4-multimodal
    "granite": GraniteParser,  # Granite 3.0 to 3.3
    "granite-20b-fc": Granite20bFcParser,  # Granite-20B-FunctionCalling
    "lfm2": Lfm2Parser,  # LFM2, LFM2.5
    "hermes": HermesParser,  # Hermes, Qwen2.5, Qwen3, Qwen3-VL, Granite 4
    "pythonic": PythonicParser,  # Llama 4
    "llama3_json": Llama3JsonParser,  # Llama 3.1 to 3.3
}
"""The formats of this package. The order is the order in which a chat template is tested for them."""

OTHER_NAMES: Mapping[str, str] = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "granite4": "hermes",
    "interns1": "internlm",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "phi4_mini_json": "phi4",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
}
"""Names that vLLM or SGLang uses for these formats, if they differ from the names in `FORMATS`."""


def format_names() -> list[str]:
    """Return the names of all formats, sorted."""
    return sorted({*FORMATS, *_entries()})


def parser_named(name: str) -> type[ToolCallParser]:
    """Return the parser of the format `name`, which may also be a name of vLLM or SGLang.

    Raises:
        InputError: No format has this name, or the format's parser cannot be loaded.

    """
    if (known := OTHER_NAMES.get(name, name)) in FORMATS:
        return FORMATS[known]
    if (entry := _entries().get(name)) is None:
        raise InputError(f"there is no tool-call format named {name!r}; the formats are {', '.join(format_names())}")
    return _loaded(entry)


def parser_for(
    template: str, vocabulary: Collection[str], response_template: Mapping[str, Any] | None = None
) -> type[ToolCallParser] | None:
    """Return the parser for a checkpoint, or None if its templates do not contain a known format.

    A response template takes precedence, because it defines the checkpoint's format. Formats of other packages are
    tested before formats of this package.

    Args:
        template: Chat template of the checkpoint.
        vocabulary: Added tokens of the tokenizer.
        response_template: `response_template` of tokenizer_config.json, if it exists.

    Raises:
        InputError: The response template cannot be read.

    """
    parsers = [*_others(), *FORMATS.values()]
    known = next((parser for parser in parsers if parser.detects(template, vocabulary)), None)
    return ResponseTemplateParser.of(response_template, known) if response_template else known


def parser_of(
    traits: ChatTraits, vocabulary: Collection[str], checkpoint: Checkpoint, given: str | None = None
) -> type[ToolCallParser]:
    """Return the parser for a checkpoint. Tools that a template has no place for are described in the Hermes format.

    Args:
        traits: Traits of the chat template.
        vocabulary: Added tokens of the tokenizer.
        checkpoint: The checkpoint.
        given: Name of the format, or None to detect it.

    Raises:
        InputError: `given` is unknown, or the checkpoint's `response_template` cannot be read.

    """
    if not traits.names("tools"):
        return HermesParser
    if given:
        return parser_named(given)
    stated = checkpoint.json("tokenizer_config.json").get("response_template")
    return parser_for(traits.template, vocabulary, stated) or HermesParser


def _entries() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _others() -> Iterator[type[ToolCallParser]]:
    for entry in _entries().values():
        try:
            yield _loaded(entry)
        except InputError as error:  # a broken package must not affect checkpoints that do not use it
            _log.warning("%s", error)


def _loaded(entry: EntryPoint) -> type[ToolCallParser]:
    try:
        parser = entry.load()
    except Exception as error:  # other packages may raise any error, and the message must name the format
        raise InputError(f"the tool-call format {entry.name!r} ({entry.value}) cannot be loaded: {error!r}") from error
    if not (isinstance(parser, type) and issubclass(parser, ToolCallParser)):
        raise InputError(f"the tool-call format {entry.name!r} ({entry.value}) is not a subclass of ToolCallParser")
    return parser
