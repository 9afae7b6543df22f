"""The configuration keys of families whose layers mindie_mm implements, and the treatment of each key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint


@dataclass(frozen=True, slots=True)
class Required:
    """A marker in place of a default, for a key that the original code requires."""

    kind: type
    """Type of the value. float also accepts integers."""


@dataclass(frozen=True, slots=True)
class Nullable:
    """The default of a key that may be null."""

    kind: type
    """Type of a value that is not null. float also accepts integers."""
    default: Any = None


def words(*texts: str) -> frozenset[str]:
    """Return the set of words in `texts`. Long lists of keys are easier to read as words separated by spaces."""
    return frozenset(" ".join(texts).split())


HOUSEKEEPING = words(
    # Keys that concern the file, the training, or the way in which the original code runs.
    "_attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path add_cross_attention architectures",
    "attn_implementation auto_map chunk_size_feed_forward cross_attention_hidden_size dtype experts_implementation",
    "finetuning_task gradient_checkpointing id2label ignore_index initializer_factor initializer_range is_decoder",
    "is_encoder_decoder label2id model_type name_or_path num_labels output_attentions output_hidden_states prefix",
    "pretraining_tp problem_type processor_class pruned_heads return_dict task_specific_params tf_legacy_loss",
    "tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers.js_config transformers_version",
    "unsloth_fixed use_bfloat16 use_cache use_return_dict",
    # Keys that are read by `generate` or by loaders of weights.
    "bad_words_ids begin_suppress_tokens bos_token_id cache_implementation decoder_start_token_id diversity_penalty",
    "do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty",
    "forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size",
    "num_beam_groups num_beams num_return_sequences output_scores pad_token_id quantization_config quantize",
    "remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens temperature",
    "top_k top_p typical_p",
)
"""Keys of any transformers configuration that do not change the logits, or are read elsewhere."""


_SIZES = words(
    "d_model depth decoder_attention_heads decoder_ffn_dim decoder_layers embed_dim encoder_attention_heads",
    "encoder_ffn_dim encoder_layers head_dim heads hidden_dim hidden_size image_size in_channels intermediate_size",
    "kv_channels layers max_position_embeddings merge_size n_heads n_layers num_attention_heads num_channels num_heads",
    "num_hidden_layers num_key_value_heads num_layers num_mel_bins out_hidden_size patch_size seq_length",
    "spatial_merge_size temporal_patch_size vocab_size width",
)
"""Keys of sizes that are positive in each model that has them. Other sizes may be 0 to leave out a part."""


def check_sizes(config: Mapping[str, Any], where: str, prefix: str = "") -> None:
    """Raise UnsupportedCheckpoint if a size in a configuration file or in a section of it is not positive.

    The arguments are those of `Keys.complete`.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value, where, f"{prefix}{name}.")
        elif name in _SIZES:
            sizes = value if isinstance(value, list) else [value]
            if any(isinstance(size, int | float) and size <= 0 for size in sizes):
                raise UnsupportedCheckpoint(f"{where}: {prefix}{name}={value} must be positive")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a configuration file, or of one section of it."""

    read: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the family applies, with the defaults of the original code. A value must have the default's type.

    A float key also accepts integers. A bool key also accepts null, which the original code treats as false. The
    elements of a list have the type of the default's first element. A tuple has the length of the default.
    """
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the answers, with the supported values.

    A null counts as an absent key unless true is supported, because the original code treats null as false.
    """
    unused: frozenset[str] = frozenset()
    """Keys that do not change the answers, in addition to `HOUSEKEEPING`."""
    sections: Mapping[str, Keys] = field(default_factory=dict)
    """Keys whose value is an object, with the keys of that object."""

    def complete(self, config: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
        """Return a copy of `config` in which missing keys have their defaults.

        Args:
            config: Contents of the file or section.
            where: Path of the file, for messages.
            prefix: Names of the enclosing sections, for messages, such as `text_config.`.

        Raises:
            UnsupportedCheckpoint: The value of a key is not supported or has the wrong type, or a required key is
                missing.

        """
        for name, served in self.only.items():
            configured = config.get(name)
            stated = name in config if True in served else configured is not None
            if stated and configured not in served:
                values = " or ".join(repr(value) for value in served) or "null"
                raise UnsupportedCheckpoint(f"{where}: {prefix}{name} is {configured!r}; supported: {values}")
        completed = dict(config)
        for name, default in self.read.items():
            if name not in config:
                if isinstance(default, Required):
                    raise UnsupportedCheckpoint(f"{where} has no {prefix}{name}")
                completed[name] = default.default if isinstance(default, Nullable) else default
            elif not _fits(config[name], default):
                raise UnsupportedCheckpoint(f"{where}: {prefix}{name}={config[name]!r} must be {_described(default)}")
        for name, keys in self.sections.items():
            section = config.get(name, {})
            if not isinstance(section, Mapping):
                raise UnsupportedCheckpoint(f"{where}: {prefix}{name}={section!r} must be an object")
            completed[name] = keys.complete(section, where, f"{prefix}{name}.")
        return completed

    def unknown(self, config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        """Yield the unknown keys of `config`. A key in a section is yielded as `section.key`."""
        known = {*self.read, *self.only, *self.unused, *self.sections, *HOUSEKEEPING}
        for name, value in config.items():
            if name not in known:
                yield f"{prefix}{name}"
            elif name in self.sections and isinstance(value, Mapping):
                yield from self.sections[name].unknown(value, f"{prefix}{name}.")


def _fits(value: Any, default: Any) -> bool:
    """Return whether a value has the type of its key's default."""
    if value is None:
        return default is None or isinstance(default, Nullable | bool)
    if isinstance(default, list | tuple):
        if not isinstance(value, list | tuple) or (isinstance(default, tuple) and len(value) != len(default)):
            return False
        return all(_fits(part, default[0]) for part in value)
    kind = _kind(default)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _kind(default: Any) -> type:
    return default.kind if isinstance(default, Required | Nullable) else type(default)


def _described(default: Any) -> str:
    """Return a description of the values that `_fits` accepts."""
    if isinstance(default, list | tuple):
        count = f" of {len(default)}" if isinstance(default, tuple) else ""
        return f"a list{count}, each {_described(default[0])}"
    word = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[_kind(default)]
    return f"{word} or null" if isinstance(default, Nullable) else word
