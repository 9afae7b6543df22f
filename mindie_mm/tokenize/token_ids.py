"""Prompts that a caller gives as token ids, whose handle words refer to blocks of the caller."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeIs

from mindie_mm.errors import InputError
from mindie_mm.inputs import type_of
from mindie_mm.tokenize.prompt import Prompt

if TYPE_CHECKING:
    import torch

TokenIds: TypeAlias = "Sequence[int] | NDArray[np.int64] | torch.Tensor"
"""Token ids of one prompt, with the handle words of its media, as `Tokenizer` returns them."""


def is_token_ids(prompt: Any) -> TypeIs[TokenIds]:
    """Return whether `prompt` is a tensor, an array or a list that begins with an integer."""
    if hasattr(prompt, "__array__"):
        return True
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    # Tensors and arrays have this method too, but a list of them is a list of prompts.
    return hasattr(prompt[0], "__index__") and getattr(prompt[0], "ndim", 0) == 0


def prompt_of_token_ids(given: TokenIds) -> Prompt:
    """Return a prompt with a copy of `given`. The engine checks its ids and handle words.

    Raises:
        InputError: The ids are not integers, do not fit into int64, or have several axes.

    """
    if isinstance(given, list | tuple):
        return Prompt(_listed(given))
    try:
        array = np.asarray(given.cpu() if hasattr(given, "cpu") else given)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's types that numpy lacks
        raise InputError(f"the token ids cannot be read: {error}") from error
    if array.dtype == np.bool_ or not np.can_cast(array.dtype, np.int64):
        raise InputError(f"the token ids have the dtype {array.dtype}; it must be int64")
    if array.ndim != 1:
        raise InputError(f"the token ids have the shape {[*array.shape]}; give the ids of one prompt, [tokens]")
    return Prompt(np.array(array, np.int64))


def _listed(given: Sequence[Any]) -> NDArray[np.int64]:
    ids = np.empty(len(given), np.int64)
    for index, one in enumerate(given):
        try:
            ids[index] = operator.index(one)
        except TypeError:
            raise InputError(f"item {index} of the token ids is {type_of(one)}; it must be an integer") from None
        except OverflowError:
            raise InputError(f"item {index} of the token ids does not fit into int64") from None
    return ids
