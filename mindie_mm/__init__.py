"""A serving worker for multimodal models. Its token ids contain references to pixels in shared memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mindie_mm.settings.environment import limit_spinning

if TYPE_CHECKING:
    from mindie_mm.batch.output.dataset import Dataset
    from mindie_mm.batch.tokenizing import TokenizedRun, tokenize_dataset
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.errors import MindieMMError
    from mindie_mm.inputs import Embeddings
    from mindie_mm.settings.config import EngineConfig, WorkerConfig
    from mindie_mm.structured.outputs import StructuredOutputs
    from mindie_mm.tokenize.mindie_tokenizer import MindIETokenizer
    from mindie_mm.tokenize.prompt import PlannedPrompt, PlannedSpan
    from mindie_mm.tokenize.tokenizer import Tokenizer
    from mindie_mm.worker.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from mindie_mm.worker.deltas import Delta
    from mindie_mm.worker.embedding import PoolingParams
    from mindie_mm.worker.llm import LLM, EmbeddingOutput, Output, ScoreOutput
    from service.offline import generate_dataset

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Dataset",
    "Delta",
    "EmbeddingOutput",
    "Embeddings",
    "EngineConfig",
    "MindIETokenizer",
    "MindieMMError",
    "Output",
    "PlannedPrompt",
    "PlannedSpan",
    "PoolingParams",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputs",
    "TokenizedRun",
    "Tokenizer",
    "WorkerConfig",
    "generate_dataset",
    "tokenize_dataset",
]
__version__ = "0.1.0"

limit_spinning()  # every process must call this before it loads torch

_HOMES = {
    "LLM": "mindie_mm.worker.llm",
    "BeamSearchOutput": "mindie_mm.worker.beam_search",
    "BeamSearchParams": "mindie_mm.worker.beam_search",
    "BeamSearchSequence": "mindie_mm.worker.beam_search",
    "Dataset": "mindie_mm.batch.output.dataset",
    "Delta": "mindie_mm.worker.deltas",
    "EmbeddingOutput": "mindie_mm.worker.llm",
    "Embeddings": "mindie_mm.inputs",
    "EngineConfig": "mindie_mm.settings.config",
    "MindIETokenizer": "mindie_mm.tokenize.mindie_tokenizer",
    "MindieMMError": "mindie_mm.errors",
    "Output": "mindie_mm.worker.llm",
    "PlannedPrompt": "mindie_mm.tokenize.prompt",
    "PlannedSpan": "mindie_mm.tokenize.prompt",
    "PoolingParams": "mindie_mm.worker.embedding",
    "SamplingParams": "mindie_mm.engine.requests.sampling_params",
    "ScoreOutput": "mindie_mm.worker.llm",
    "StructuredOutputs": "mindie_mm.structured.outputs",
    "TokenizedRun": "mindie_mm.batch.tokenizing",
    "Tokenizer": "mindie_mm.tokenize.tokenizer",
    "WorkerConfig": "mindie_mm.settings.config",
    "generate_dataset": "service.offline",
    "tokenize_dataset": "mindie_mm.batch.tokenizing",
}


def __getattr__(name: str) -> Any:
    # Import the module late, because a program that needs only `mindie_mm.shm` should not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    # By default, completion in a REPL would offer the names that this module imports, but not the public names.
    return [*__all__, "__version__"]
