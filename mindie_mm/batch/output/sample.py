"""A row of a run, and its inputs for transformers' model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.batch.same_run import model_digest
from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.tokenize.prompt import MediaSpan

if TYPE_CHECKING:
    from torch import Tensor

    from mindie_mm.nn.model_inputs import ModelInputs

_CHECKPOINTS = 4


@dataclass(frozen=True, slots=True)
class RunModel:
    """The checkpoint that tokenized the rows of a run."""

    path: str
    """Checkpoint directory, or empty for the embedded checkpoint."""
    family: str
    """Name of the family, or empty if the checkpoint determines the family."""
    digest: str
    """Digest of the files that tokenization reads."""

    def processor(self) -> ModelInputs:
        """Return the processor of the checkpoint.

        Raises:
            InputError: The files have been changed since the run.
            UnsupportedCheckpoint: The checkpoint does not exist or cannot be read.

        """
        return _opened(self)[0]

    def pad_token(self) -> int:
        """Return the tokenizer's padding id or else its end-of-text token. `processor` lists the errors."""
        return _pad_token(self)


@lru_cache(_CHECKPOINTS)
def _opened(model: RunModel) -> tuple[ModelInputs, Any]:
    from mindie_mm.models import family_of  # imported late, because it imports torch

    checkpoint = Checkpoint.open(model.path or None)
    if model_digest(checkpoint) != model.digest:
        raise InputError(
            f"{checkpoint.path} is not the checkpoint that tokenized the rows: its tokenizer files differ. If the "
            "checkpoint has been moved, open the run with Dataset(folder, model=...)"
        )
    family = family_of(checkpoint, model.family or None)
    return family.processor(checkpoint), partial(family.tokenizer, family.translated(checkpoint))


@lru_cache(_CHECKPOINTS)
def _pad_token(model: RunModel) -> int:
    _, open_tokenizer = _opened(model)
    tokenizer = open_tokenizer()
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


@dataclass(frozen=True, slots=True)
class SampleItem:
    """A media item of a sample."""

    slots: NDArray[np.int64]
    view: Mapping[str, NDArray[Any]]
    shape: MediaShape

    @classmethod
    def of(cls, ids: NDArray[np.int64], span: MediaSpan, arrays: Mapping[str, NDArray[Any]]) -> SampleItem:
        """Find the placeholders of an item in the ids of its sample."""
        own = ids[span.start : span.stop]
        is_slot = (own == span.token) | (own == (span.token if span.second_token is None else span.second_token))
        return cls(span.start + np.flatnonzero(is_slot), arrays, MediaShape.of(arrays))


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a run."""

    row: int
    id: str
    ids: NDArray[np.int64] | None
    """Token ids, int64 [T], with placeholder ids at the positions of features. None if the row has an error."""
    spans: Sequence[MediaSpan]
    """Positions of each media item in `ids`."""
    arrays: Sequence[Mapping[str, NDArray[Any]]]
    """For each media item, its arrays by name. The arrays are read-only views of the mapped file."""
    error: str | None = None
    """Error of the row, or None if the row has no error."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the columns that the run kept (`--keep-columns`), by name."""
    assistant: Sequence[Sequence[int]] | None = None
    """Ranges [start, stop) of `ids` that are the assistant's turns. None without `--assistant-spans`."""
    model: RunModel | None = field(default=None, repr=False)
    """Checkpoint that tokenized the row. None if the row has an error."""

    def model_inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of transformers' model, as a batch of size 1.

        The arrays equal those of transformers' processor, or of the original code for families that transformers lacks.

        Raises:
            InputError: The row has an error, or another checkpoint tokenized the row.
            UnsupportedCheckpoint: The checkpoint cannot be read.

        """
        ids, items = self.usable()
        assert self.model is not None
        return self.model.processor().model_inputs(ids, items)

    def answers(self) -> Sequence[Sequence[int]]:
        """Return the ranges of the assistant's turns. Raise InputError if the run does not contain them."""
        if self.assistant is None:
            raise InputError(
                f"the assistant's turns of row {self.row} are not known. Tokenize conversations with "
                "--assistant-spans, or use labels='all'"
            )
        return self.assistant

    def usable(self) -> tuple[NDArray[np.int64], list[SampleItem]]:
        """Return the ids and the media items. Raise InputError if the row has an error."""
        if self.ids is None:
            raise InputError(f"row {self.row} has no ids, because it failed: {self.error}. Leave out such samples")
        if self.spans and not all(self.arrays):
            raise InputError(f"row {self.row} has no arrays, because its run was tokenized with --plan")
        located = zip(self.spans, self.arrays, strict=True)
        return self.ids, [SampleItem.of(self.ids, span, arrays) for span, arrays in located]
