"""Tokenization of text and media to int64 ids, and the tokenizer stage with its processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mindie_mm.tokenize.prompt import MediaSpan, Prompt
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.stage.async_tokenizer import AsyncTokenizer

if TYPE_CHECKING:
    from mindie_mm.tokenize.tokenizer import Tokenizer

__all__ = ["AsyncTokenizer", "MediaSpan", "Prompt", "TokenizeRequest", "Tokenizer"]


def __getattr__(name: str) -> Any:
    # Import Tokenizer late. The service process needs only AsyncTokenizer, and starts seconds earlier without torch.
    if name != "Tokenizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("mindie_mm.tokenize.tokenizer").Tokenizer


def __dir__() -> list[str]:
    return [*__all__]
