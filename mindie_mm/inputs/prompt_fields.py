"""What stands beside the items of a request and changes its prompt: what a chat template gets, what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.errors import InputError

OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values of a field that are as good as none."""
PROMPT_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("continue_final_message", "chat_template", "documents", "functions"), OFF),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), OFF),
    "function_call": (None, "none", "auto"),
    # vLLM's word for what the context holds: no prompt that is taken here changes by it.
    "truncate_prompt_tokens": (*OFF, -1),
}
"""Fields of vLLM's and OpenAI's requests that would make another prompt, and the values of each that would not."""


def template_variables(
    given: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    reasoning_effort: Any = None,
) -> dict[str, Any]:
    """What a chat template gets beside the messages: `given`, tools and effort. InputError for a choice not served."""
    if tool_choice not in (None, "auto", "none"):
        raise InputError("tool_choice must be 'auto' or 'none': no call is enforced", param="tool_choice")
    if not isinstance(reasoning_effort, str | None):
        raise InputError(f"reasoning_effort is {reasoning_effort!r}, it must be a word", param="reasoning_effort")
    variables = dict(given or {})
    if tools and tool_choice != "none":
        variables["tools"] = tools
    if reasoning_effort:
        variables["reasoning_effort"] = reasoning_effort
    return variables


def refused_fields(given: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Which of `fields` are `given` with none of the values that stand there."""
    return [
        name for name, value in given.items() if name in fields and not any(_same(value, one) for one in fields[name])
    ]


def _same(value: Any, one: Any) -> bool:
    """Whether JSON writes them alike: 1 is 1.0, and no true."""
    return (type(value) is type(one) or {type(value), type(one)} == {int, float}) and bool(value == one)
