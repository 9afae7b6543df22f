"""Text and media to int64 ids: the tokenizer stage, and its processes."""

from mindie_mm.tokenize.messages import TokenizeRequest
from mindie_mm.tokenize.pool import TokenizerPool
from mindie_mm.tokenize.prompt import Prompt, Span
from mindie_mm.tokenize.tokenizer import Tokenizer

__all__ = ["Prompt", "Span", "TokenizeRequest", "Tokenizer", "TokenizerPool"]
