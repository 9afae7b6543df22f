"""A tokenizer with the interface of MindIE-LLM's tokenizer, for MindIE's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from mindie_mm.inputs import parse_inputs
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize.tokenizer import Tokenizer


class MindIETokenizer:
    """A replacement for MindIE's tokenizer. Use it as a context manager.

    `tokenize` has the interface of MindIE's routers, and `make_context` has the interface of MindIE's input builders.
    Media are stored in MindIE's wire format. As in MindIE, unknown keyword arguments have no effect.
    """

    is_multimodal: ClassVar[bool] = True
    """MindIE's routers read this field of their tokenizers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take ownership of a tokenizer with the wire "mindie". Call `from_pretrained` instead."""
        self._tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls, path: str | Path | None = None, family: str | None = None, caps: MediaCaps | None = None
    ) -> Self:
        """Return the tokenizer of a checkpoint. `Tokenizer.from_pretrained` describes the arguments.

        Raises:
            UnsupportedCheckpoint: The checkpoint is not supported, or its family has no MindIE layout.

        """
        return cls(Tokenizer.from_pretrained(path, wire="mindie", family=family, caps=caps))

    def tokenize(self, inputs: Sequence[Mapping[str, Any]], **kwargs: Any) -> torch.Tensor:
        """Return the ids of one user turn. If the checkpoint has no chat template, join the items.

        Args:
            inputs: Items in order, such as {"image": path} or {"text": ...}.
            kwargs: `shm_name_save_path` is the path file of the request. The default is dirname(dirname(first media
                path))/shm_name.txt.

        Returns:
            int64 [T] on the CPU, with handle words in MindIE's format. The segments exist until the path file is
            released, by MindIE or by `mindie_mm.shm.release`.

        Raises:
            InputError: An input is invalid. After any error, no segment remains.
            SharedMemoryError: Shared memory cannot be used.

        """
        parse_inputs(inputs)  # for errors that name an item of `inputs`, not of a message
        path_file = kwargs.get("shm_name_save_path")
        if self._tokenizer.has_template:
            return self._tokenizer.tokenize_chat([{"role": "user", "content": [*inputs]}], path_file)
        return self._tokenizer.tokenize(inputs, path_file)

    def make_context(self, rank: int, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> torch.Tensor:
        """Return the ids of a conversation.

        Args:
            rank: Has no effect.
            conversation: Messages with a role and a content. The content is a string or a list of items.
            kwargs: `shm_name_save_path` has the same meaning as in `tokenize`. `add_generation_prompt` says whether the
                prompt ends with the header of the assistant's turn, by default True. `chat_template_kwargs` contains
                further variables of the chat template.

        Returns:
            int64 [T] on the CPU, as `tokenize` returns it.

        Raises:
            InputError, SharedMemoryError: The same conditions as in `tokenize`.

        """
        return self._tokenizer.tokenize_chat(
            conversation,
            kwargs.get("shm_name_save_path"),
            kwargs.get("add_generation_prompt", True),
            **(kwargs.get("chat_template_kwargs") or {}),
        )

    def close(self) -> None:
        """Release the tokenizer's resources. Segments remain until their path file is released."""
        self._tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
