"""The format in which the served checkpoint writes tool calls and reasoning. Chat prompts are adapted to it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindie_mm.errors import InputError
from mindie_mm.inputs import template_variables
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.tokenize.text.chat_traits import ChatTraits
from mindie_mm.tool_calls.history import adapted
from mindie_mm.tool_calls.parser import ToolCallParser
from mindie_mm.tool_calls.reasoning import ReasoningFormat, reasoning_for, reasoning_named
from mindie_mm.tool_calls.registry import parser_named, parser_of
from mindie_mm.worker.worker import Worker
from service.schemas.tool_types import ToolUse

_log = logging.getLogger(__name__)
_NO_REASONING = "none"


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """The format of tool calls and reasoning of the served checkpoint."""

    parser: type[ToolCallParser]
    """Parser of the tool calls."""
    reasoning: ReasoningFormat | None
    """Format of the reasoning, or None if the checkpoint does not write reasoning."""
    traits: ChatTraits
    """Traits of the chat template."""
    without_template: Literal["describe", "ignore", "refuse"]
    """How to handle tools if the template has no place for them."""
    added_tokens: Mapping[str, int]
    """Text and id of each added token of the tokenizer."""
    special: frozenset[int]
    """Ids of the special tokens, which answers do not show."""
    strict: bool = False
    """True if a reasoning effort is refused when the template has no place for it. Otherwise it is ignored."""

    @classmethod
    def of(cls, worker: Worker, config: ServiceConfig) -> ChatDialect:
        """Return the formats that the settings name. If a setting is missing, detect its format in the chat template.

        Raises:
            InputError: A setting names an unknown format, or the checkpoint's `response_template` cannot be read.

        """
        traits = worker.tokenizer_stage.traits.chat
        added = worker.tokenizer.get_added_tokens_decoder()
        vocabulary = {token.content: index for index, token in added.items()}
        parser = parser_of(traits, vocabulary, Checkpoint.open(worker.config.model), config.tool_call_parser)
        reasoning = reasoning_of(config) if config.reasoning_parser else reasoning_for(traits.template)
        chat_dialect = cls(
            parser,
            reasoning,
            traits,
            config.tools_without_template,
            vocabulary,
            frozenset(index for index, token in added.items() if token.special),
            config.strict,
        )
        _log.debug(
            "parser of tool calls: %s; end of the reasoning: %s",
            chat_dialect.parser.__name__,
            reasoning and reasoning.end,
        )
        return chat_dialect

    def request(
        self,
        messages: Sequence[Any],
        use: ToolUse,
        variables: Mapping[str, Any] | None,
        reasoning_effort: str | None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the messages and the variables for the chat template.

        Raises:
            InputError: A variable is not valid, the request requires a tool call although tools are ignored, or the
                template does not use the reasoning effort and the service is strict.

        """
        tools = use.offered
        given, reasoning_effort = self.traits.with_effort(variables, reasoning_effort)
        effort = reasoning_effort or given.get("reasoning_effort")
        if self.strict and effort and effort != "none" and not self.traits.names("reasoning_effort"):
            raise InputError(
                f"reasoning_effort is {effort!r}, but the model's chat template does not use it; leave it out, or "
                "start the service without --strict",
                param="reasoning_effort",
            )
        if tools and self.without_template == "ignore" and self.traits.template and not self.traits.names("tools"):
            self._ignore(use)
            tools = ()
        try:
            describes = self.without_template != "refuse"
            messages, tools = adapted(messages, tools, self.traits, self.parser, describes=describes)
        except RecursionError as error:
            raise InputError("a tool or a message is nested too deeply") from error
        return messages, template_variables(given, tools, None, reasoning_effort)

    def reads_calls(self, use: ToolUse) -> bool:
        """Return whether the answer to a request may contain tool calls."""
        return bool(use.offered) and (self.without_template != "ignore" or self.traits.names("tools"))

    def shown_tokens(self, parser: type[ToolCallParser] | None, reasoning: ReasoningFormat | None) -> Collection[str]:
        """Return the special tokens that the parsers need to see in the text."""
        texts = [*(parser.markers if parser else ()), *([reasoning.start, reasoning.end] if reasoning else [])]
        if not texts:
            return ()
        return [
            token
            for token, index in self.added_tokens.items()
            if index in self.special and any(token in text for text in texts)
        ]

    def _ignore(self, use: ToolUse) -> None:
        if use.mode == "required":
            raise InputError(
                f"{use.choice_field} requires a call, but this service ignores tools; start the service with "
                "--tools-without-template describe",
                param=use.choice_field,
            )
        if not _warned:
            _warned.append(True)
            _log.warning(
                "ignoring tools, because the chat template has no place for them; this warning is not repeated"
            )


_warned: list[bool] = []


def reasoning_of(config: ServiceConfig) -> ReasoningFormat | None:
    """Return the format of reasoning that the settings name. Raise InputError if there is no such format."""
    name = config.reasoning_parser
    return None if name in (None, _NO_REASONING) else reasoning_named(name)


def require_formats(config: ServiceConfig) -> None:
    """Raise InputError if a setting names an unknown format."""
    if config.tool_call_parser is not None:
        parser_named(config.tool_call_parser)
    reasoning_of(config)
