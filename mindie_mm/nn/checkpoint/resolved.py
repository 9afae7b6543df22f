"""Corrections to a configuration that transformers has read from config.json.

transformers 5 interprets some keys differently from earlier releases, which many checkpoints were published for. The
old interpretation is correct, because the weights were trained with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint

_PLAIN_ROPE = frozenset({"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"})
_PARTS = ("rope_parameters", "rope_scaling")
_LENGTHENED = frozenset({"yarn", "linear"})
"""Types of rotary frequencies that are made for more positions than `max_position_embeddings`."""


def settle(checkpoint: Checkpoint, config: Any, default_theta: float | None = None) -> None:
    """Correct `config`, transformers' configuration of the checkpoint, in place.

    Args:
        checkpoint: The checkpoint that `config` was read from.
        config: The configuration of the whole model.
        default_theta: Base of the rotary frequencies of the text model if config.json has none. None means the default
            of transformers 5.

    Raises:
        UnsupportedCheckpoint: Rotary frequencies depend on the batch, or have settings that would be ignored. A value
            cannot belong to a model of transformers.

    """
    _check_values(checkpoint, config)
    if default_theta is not None:
        _settle_theta(checkpoint.config, config.get_text_config(), default_theta)
    _settle_ties(checkpoint.config, config)
    _check_layered_rope(checkpoint, config.get_text_config())
    _settle_rope(checkpoint, config)


def _check_values(checkpoint: Checkpoint, config: Any) -> None:
    """Raise UnsupportedCheckpoint for a value that transformers would refuse only when it builds the model."""
    from transformers.activations import ACT2FN  # imported late: the tokenizer imports the families

    for field in dataclasses.fields(config):
        if "act" in field.name and field.default in ACT2FN and (value := getattr(config, field.name)) not in ACT2FN:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: {field.name} is {value!r}; the activation functions are {', '.join(ACT2FN)}"
            )
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _check_values(checkpoint, part)


def _settle_theta(stated: Mapping[str, Any], text: Any, default_theta: float) -> None:
    """Set the rotary frequencies from text_config, else from the top level of config.json, else from the default.

    In transformers 4, each configuration class of a text model had its own default. If text_config has no value,
    transformers 5 ignores the top level and uses a default of its own, usually 10000.
    """
    own = stated.get("text_config") or {}
    theta = _stated(own, "rope_theta") or _stated(stated, "rope_theta") or default_theta
    text.rope_parameters["rope_theta"] = float(theta)
    fraction = _stated(own, "partial_rotary_factor") or _stated(stated, "partial_rotary_factor")
    if fraction is not None and "partial_rotary_factor" in text.rope_parameters:
        text.rope_parameters["partial_rotary_factor"] = fraction


def _stated(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a key for rotary frequencies from its old or new place in config.json, or None."""
    places = (config, *(config[part] for part in _PARTS if isinstance(config.get(part), Mapping)))
    return next((place[name] for place in places if place.get(name) is not None), None)


def _settle_ties(stated: Mapping[str, Any], config: Any) -> None:
    """Set tie_word_embeddings from text_config if the top level does not set it, or if there is no text_config.

    transformers 4 read this key from the text model's configuration, which a flat config.json describes at the top
    level. transformers 5 reads it from the configuration of the whole model, and some classes prefer the text model's
    default.
    """
    own, top = (part.get("tie_word_embeddings") for part in (stated.get("text_config") or {}, stated))
    if top is None and own is not None:
        config.tie_word_embeddings = own
    elif top is not None and "text_config" not in stated:
        config.tie_word_embeddings = top


def _check_layered_rope(checkpoint: Checkpoint, text: Any) -> None:
    """Raise UnsupportedCheckpoint if there are settings for all layers in addition to settings per layer type.

    transformers would ignore the settings for all layers.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    layered = [name for name, value in parameters.items() if isinstance(value, dict)]
    if layered and (loose := parameters.keys() - {*layered}):
        raise UnsupportedCheckpoint(
            f"{checkpoint.path}: rope_parameters has {', '.join(sorted(loose))} for all layers together; this model "
            f"requires these parameters separately for each type of layer: {', '.join(layered)}"
        )


def _settle_rope(checkpoint: Checkpoint, config: Any) -> None:
    """Replace dynamic rotary frequencies by default frequencies, or raise UnsupportedCheckpoint if they can differ.

    Dynamic frequencies depend on the longest position in a batch, so one sequence of a flat batch would affect
    another. They equal the default frequencies up to `max_position_embeddings`, and no sequence is longer. However,
    the temporal positions of M-RoPE may be larger, and model-specific settings may change the frequencies. Dynamic
    frequencies with M-RoPE or with such settings are therefore refused.

    With `alpha` and a factor of 1, frequencies that are called dynamic do not depend on the batch, as in vLLM: `alpha`
    changes their base.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    for entry in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        rope_type = entry.get("rope_type")
        if rope_type not in (None, "default", *ROPE_INIT_FUNCTIONS):
            raise UnsupportedCheckpoint(
                f"{checkpoint.path} has rope_type {rope_type!r}; it must be default, {', '.join(ROPE_INIT_FUNCTIONS)}"
            )
        if rope_type == "dynamic" and entry.get("alpha") and entry.get("factor") in (None, 1):
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            entry["rope_theta"] *= entry.pop("alpha") ** (width / (width - 2))
            entry["rope_type"] = rope_type = "default"
        if rope_type == "longrope" or (rope_type == "dynamic" and entry.keys() - _PLAIN_ROPE):
            raise UnsupportedCheckpoint(
                f"{checkpoint.path} has rope_type {rope_type!r}, whose frequencies depend on the longest "
                "sequence of a batch; this is not supported"
            )
        if rope_type == "dynamic":
            entry["rope_type"] = "default"
            entry.pop("factor", None)


def context_length(text: Any) -> int:
    """Return the maximum number of positions of a text model, as vLLM does.

    YaRN and linear scaling multiply the positions by `factor`. For YaRN, the positions are those of the original model
    if they are given. With all other types, `max_position_embeddings` is the limit: in llama3 it includes the factor,
    and dynamic frequencies are replaced by default frequencies. It also includes the factor if each type of layer has
    its own frequencies.
    """
    positions: int = text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") not in _LENGTHENED or not rope.get("factor"):
        return positions
    if rope["rope_type"] == "yarn":
        positions = rope.get("original_max_position_embeddings") or positions
    return int(positions * rope["factor"])


def positions_of(config: Any) -> int | None:
    """Return the maximum number of positions of transformers' configuration of a whole model, or None if unknown."""
    text = config.get_text_config()
    if not hasattr(text, "max_position_embeddings"):  # a decoder of an encoder-decoder has another name for it
        return getattr(text, "max_target_positions", None)
    return context_length(text)
