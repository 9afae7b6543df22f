"""The inputs of transformers' model for the samples of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.batch.same_run import model_digest
from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.tokenize.prompt import MediaSpan

if TYPE_CHECKING:
    from mindie_mm.nn.model_inputs import ModelInputs

_CHECKPOINTS = 4


@dataclass(frozen=True, slots=True)
class RunModel:
    """The checkpoint with which the rows of a run were tokenized."""

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
        return _processor(self)


@lru_cache(_CHECKPOINTS)
def _processor(model: RunModel) -> ModelInputs:
    from mindie_mm.models import family_of  # imported late, because it imports torch

    checkpoint = Checkpoint.open(model.path or None)
    if model_digest(checkpoint) != model.digest:
        raise InputError(
            f"{checkpoint.path} is not the checkpoint that tokenized the rows: its tokenizer files differ. If the "
            "checkpoint has been moved, open the run with Dataset(folder, model=...)"
        )
    return family_of(checkpoint, model.family or None).processor(checkpoint)


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
