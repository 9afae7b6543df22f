"""The modules of sentence-transformers that turn hidden states into embeddings, or logits into scores.

A checkpoint lists them in modules.json, and describes each of them in a config.json in the module's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import Pooling

_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Modes of Pooling, by the names of the switches in earlier versions of sentence-transformers."""
_ACTIVATIONS = {None: True, "Sigmoid": True, "Identity": False}
"""True if a score is the sigmoid of the difference of logits, by the class of the activation."""


@dataclass(frozen=True, slots=True)
class LogitScore:
    """A score from the logits of two tokens after the prompt."""

    true_token_id: int
    false_token_id: int
    is_sigmoid: bool
    """True if the score is the sigmoid of the difference of the logits, and not the difference itself."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Settings of a checkpoint for embeddings and scores."""

    pooling: Pooling | None = None
    """Hidden states of an embedding. None if the checkpoint does not compute embeddings."""
    normalizes: bool = False
    """True if embeddings have the length 1."""
    score: LogitScore | None = None
    """How a pair of texts is scored. None if the checkpoint does not score pairs."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Instructions by name."""
    default_prompt: str | None = None
    """Name of the instruction for requests that name none."""
    includes_prompt: bool = True
    """True if the instruction's tokens are pooled, too."""
    chat: bool = True
    """True if texts become turns of a chat when the checkpoint has a chat template."""
    template: str | None = None
    """Name of the chat template. None means the default."""
    opens_turn: bool = False
    """True if the prompt ends with the header of the assistant's turn."""
    max_tokens: int | None = None
    """Maximum number of tokens of a prompt, apart from the context length."""
    refusal: str | None = None
    """Reason why neither embeddings nor scores are computed."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> SentenceModules | None:
        """Read the files of a checkpoint. Return None if it has no modules.json.

        Raises:
            UnsupportedCheckpoint: A file cannot be read, or has an entry of a wrong type.

        """
        if not checkpoint.has(_MODULES):
            return None
        modules = _modules(checkpoint)
        try:
            return cls(**_read(checkpoint, modules))
        except _Unsupported as unsupported:
            return cls(refusal=f"{_MODULES} of the checkpoint describes {unsupported}, which is not supported")
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: the files of sentence-transformers ({_MODULES}) cannot be read: {error}"
            ) from error


class _Unsupported(Exception):
    """The files describe something that is not supported."""


def _modules(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return the class and the folder of each module, in order."""
    file = checkpoint.path / _MODULES
    try:
        with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
            listed = json.loads(file.read_text(encoding="utf-8"))
        return [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnsupportedCheckpoint(f"{file} is not a list of modules with type and path") from error


def _read(checkpoint: Checkpoint, modules: list[tuple[str, str]]) -> dict[str, Any]:
    settings = checkpoint.json(_SETTINGS)
    found: dict[str, Any] = {
        "prompts": {
            name: text for name, text in (settings.get("prompts") or {}).items() if isinstance(text, str) and text
        },
        "default_prompt": settings.get("default_prompt_name"),
    }
    for place, (kind, folder) in enumerate(modules):
        config = checkpoint.json(f"{folder}/config.json") if folder else {}
        match kind:
            case "Transformer" if not found.keys() & {"pooling", "score"}:
                found |= _transformer(checkpoint, folder)
            case "Pooling" if "pooling" not in found:
                found |= _pooling(config)
            case "Normalize" if "pooling" in found:
                if config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
                    raise _Unsupported(f"a module Normalize of {config['module_input_name']}")
                found["normalizes"] = True
            case "LogitScore" if not found.keys() & {"pooling", "score"}:
                found["score"] = _score(config, settings.get("activation_fn"))
            case _:
                raise _Unsupported(f"a module {kind} in place {place}")
    return found


def _transformer(checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    config = checkpoint.json(f"{folder}/{_TRANSFORMER}" if folder else _TRANSFORMER)
    if folder:
        raise _Unsupported(f"a model in the folder {folder}")
    if config.get("do_lower_case"):
        raise _Unsupported("lower-case text")
    modalities = config.get("modality_config")
    template = (config.get("processing_kwargs") or {}).get("chat_template") or {}
    return {
        "chat": modalities is None or "message" in modalities,
        "template": template.get("chat_template"),
        "opens_turn": bool(template.get("add_generation_prompt")),
        "max_tokens": config.get("max_seq_length"),
    }


def _pooling(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("pooling_mode") or [mode for name, mode in _SWITCHES.items() if config.get(name)] or "mean"
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise _Unsupported(f"the pooling {', '.join(map(str, modes))}")
    return {"pooling": _POOLINGS[modes[0]], "includes_prompt": config.get("include_prompt") is not False}


def _score(config: Mapping[str, Any], activation: str | None) -> LogitScore:
    true_id, false_id = config["true_token_id"], config.get("false_token_id")
    if false_id is None:
        raise _Unsupported("a LogitScore without false_token_id")
    name = None if activation is None else str(activation).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise _Unsupported(f"the activation {activation}")
    return LogitScore(int(true_id), int(false_id), _ACTIVATIONS[name])
