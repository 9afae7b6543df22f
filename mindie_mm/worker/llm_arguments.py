"""Checks of the arguments of `LLM`'s methods: prompts, and sampling settings for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import Item, require_switches, type_of
from mindie_mm.settings.paths import working_directory
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_items
from mindie_mm.tokenize.token_ids import TokenIds, is_token_ids

Params = SamplingParams | Sequence[SamplingParams]
"""Sampling settings of all inputs of a call, or a list with the settings of each input."""
Lora = str | Sequence[str | None] | None
"""Name of the LoRA adapter of all inputs of a call, or a list with a name or None for each input."""
Parse = Callable[[], "TokenizeRequest | TokenIds"]
"""Function that parses a prompt. It is called when the prompt's turn comes, so that an invalid prompt fails alone."""

_PROMPTS = (
    "give a string, a list of items such as [{'image': path}, {'text': question}], token ids, or a list with one of "
    "these for each prompt"
)


def params_of(given: Params, num_inputs: int, vocab_size: int) -> list[SamplingParams]:
    """Return the sampling settings of each input.

    Raises:
        InputError: `given` is a list of another length, has an element of another type, or a setting is invalid.

    """
    several: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if isinstance(given, list | tuple) and len(several) != num_inputs:
        raise InputError(
            f"params has {len(several)} element{'s' * (len(several) != 1)} for {num_inputs} "
            f"input{'s' * (num_inputs != 1)}; give one for each input, or the same SamplingParams for all"
        )
    for one in several:
        if not isinstance(one, SamplingParams):
            raise InputError(f"params is {type_of(one)}; it must be SamplingParams, or a list of them")
        if one.pooling is not None:
            raise InputError(f"pooling is {one.pooling!r}; call LLM.embed to compute embeddings", param="pooling")
    checked = [one.check(vocab_size) for one in several]
    return checked if isinstance(given, list | tuple) else checked * num_inputs


def requests_of(name: str, given: Any, chat_template: bool, parse_special: bool | None, webui: bool) -> list[Parse]:
    """Return one function per prompt of the argument `name`, which parses this prompt.

    The argument is a prompt or a list of prompts.
    """
    switches = chat_template, parse_special, webui
    if isinstance(given, str) or is_token_ids(given) or _is_items(given):
        return [request_of(name, given, *switches)]
    if not isinstance(given, list | tuple):
        raise InputError(f"{name} is {type_of(given)}; {_PROMPTS}")
    require_switches(chat_template=chat_template, webui=webui)
    return [request_of(f"{name}[{index}]", one, *switches) for index, one in enumerate(given)]


def _is_items(given: Any) -> bool:
    """Return whether `given` is a `List[Dict]`. An empty list is an empty list of prompts."""
    return isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(one, Mapping) for one in given)


def request_of(name: str, prompt: Any, chat_template: bool, parse_special: bool | None, webui: bool) -> Parse:
    """Return the function that parses the prompt `name` of a call."""
    require_switches(chat_template=chat_template, webui=webui)
    if parse_special is not None:
        require_switches(parse_special=parse_special)
    if isinstance(prompt, str):
        prompt = [{"text": prompt}]
    if is_token_ids(prompt):
        return lambda: prompt
    if isinstance(prompt, Mapping):
        raise InputError(f"{name} is one item of a prompt; put the items of a prompt in a list, and {_PROMPTS}")
    if not isinstance(prompt, list | tuple):
        raise InputError(f"{name} is {type_of(prompt)}; {_PROMPTS}")
    options = PromptOptions(parse_special=parse_special)
    given, folder = list(prompt), working_directory()
    return lambda: request_of_items(given, webui=webui, folder=folder, chat=chat_template, options=options)


def pairs_of(queries: Any, documents: Any) -> list[tuple[Sequence[Item], Sequence[Item]]]:
    """Return the pairs of `LLM.score`.

    Raises:
        InputError: An argument is neither a string, nor a list of items, nor a list of these, or there are neither one
            query nor as many queries as documents.

    """
    sides = [_parts_of(name, given) for name, given in (("data_1", queries), ("data_2", documents))]
    if len(sides[0]) not in (1, len(sides[1])):
        raise InputError(
            f"data_1 has {len(sides[0])} queries for {len(sides[1])} documents in data_2; give one query, or one for "
            "each document"
        )
    return [*zip(sides[0] * (len(sides[1]) // len(sides[0])), sides[1], strict=True)]


def _parts_of(name: str, given: Any) -> list[Sequence[Item]]:
    several = [given] if isinstance(given, str) or _is_items(given) else given
    if not isinstance(several, list | tuple) or not several:
        raise InputError(f"{name} is {type_of(given)}; give a string, a list of items, or a list of these, not empty")
    parts: list[Sequence[Item]] = []
    for index, one in enumerate(several):
        if not isinstance(one, str) and not _is_items(one):
            raise InputError(f"{name}[{index}] is {type_of(one)}; it must be a string or a list of items")
        items = [{"text": one}] if isinstance(one, str) else list(one)
        parts.append(request_of_items(items, folder=working_directory()).items or ())
    return parts


def with_loras(params: Sequence[SamplingParams], lora: Lora) -> list[SamplingParams]:
    """Return the settings of each input with the LoRA adapter of the argument `lora`.

    Raises:
        InputError: `lora` is a list of another length, or an element is neither a name nor None.

    """
    if lora is None:
        return [*params]
    names: list[Any] = [lora] * len(params) if isinstance(lora, str) else []
    if isinstance(lora, list | tuple):
        names = [*lora]
        if len(names) != len(params):
            raise InputError(f"lora has {len(names)} names for {len(params)} inputs; give one for each input")
    elif not isinstance(lora, str):
        raise InputError(f"lora is {type_of(lora)}; it must be the name of an adapter, or a list of names")
    for name in names:
        if not isinstance(name, str | None):
            raise InputError(f"lora has {type_of(name)} as an element; it must be the name of an adapter or None")
    return [msgspec.structs.replace(one, lora=name) for one, name in zip(params, names, strict=True)]
