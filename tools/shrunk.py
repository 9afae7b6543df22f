"""Small checkpoints with random weights, made from the published config.json of a checkpoint.

All settings stay as published, except sizes. Special tokens keep their published ids. A checkpoint in its authors'
layout is written in transformers' layout.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import ImageFont
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from mindie_mm.device import open_device
from mindie_mm.errors import InputError
from mindie_mm.inputs import Kind
from mindie_mm.models import family_of
from mindie_mm.models._phi4_multimodal_long_rope import LONG_ROPE
from mindie_mm.nn.checkpoint.config_keys import Keys
from mindie_mm.nn.checkpoint.config_only import ConfigOnly
from mindie_mm.nn.checkpoint.missing_files import VOCABULARIES
from mindie_mm.nn.family import Family
from mindie_mm.nn.pretrained_family import PretrainedFamily
from tools.small_parts import SECTIONS, TOKENS, write_adapters

WIDTH, HEADS, INNER, EXPERTS = 32, 2, 128, 4
_HEAD, _PARTLY_ROTATED_HEAD = 16, 32
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "width", "n_embed", "input_dim", "output_dim"), WIDTH),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "word_embed_proj_dim", "encoder_hidden_size"), WIDTH),
    **dict.fromkeys(("downsample_channels", "projector_hidden_size", "projection_hidden_size"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_heads", "heads", "num_groups"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "linear_key_head_dim", "linear_value_head_dim"), _HEAD),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _HEAD),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), INNER),
    **dict.fromkeys(("image_emb_dim", "depthwise_separable_out_channel", "ext_pw_out_channel"), WIDTH),
    **dict.fromkeys(("nemo_conv_channels", "sscp_conv_channel_size"), WIDTH),
    **dict.fromkeys(("image_num_heads", "conf_num_attention_heads"), HEADS),
    "image_head_dim": _HEAD,
    **dict.fromkeys(("block_ff_dim", "image_mlp_dim"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), WIDTH),
    "depths": 1,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,  # the few layers that are left may have no layer of the same type before them
}
"""New values of sizes, by their names in config.json. A list gets this value for each element."""
_DEPTHS = (
    *("num_hidden_layers", "depth", "layers", "encoder_layers", "decoder_layers", "num_layers"),
    *("image_num_layers", "conf_num_hidden_layers", "num_blocks"),
)
_INDICES = re.compile(r".*_ind(exes|ices|ex_list)|.*_layer_ids")
_ROPE = ("rope_scaling", "rope_parameters")
_SECTIONS = ("mrope_section", "xdrope_section")
_USUAL = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
_TOKEN = re.compile(r"(\w+)_token_(?:id|index)")
_NOT_COPIED = re.compile(r"SOURCE|weight_names\.json|.*\.index\.json|.*quant.*_config\.json")
_QUANTIZED = ("quantization_config", "compression_config")
_DROPPED = (*_QUANTIZED, "dtype", "torch_dtype", "_attn_implementation")
_PARTS: Mapping[Kind, str] = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")


@dataclass(frozen=True)
class _Recorded(ConfigOnly):
    """A checkpoint that records the preprocessing settings that its family reads."""

    settings: dict[Kind, dict[str, Any]] = field(default_factory=dict, compare=False)
    required: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)
    fonts: set[str] = field(default_factory=set, compare=False)

    def binary(self, name: str) -> bytes:
        if name.endswith(".ttf"):
            self.fonts.add(name)
        return super().binary(name)

    def require(self, name: str, keys: Collection[str]) -> dict[str, Any]:
        self.required[name] = super().require(name, keys)
        return self.required[name]

    def preprocessor(self, kind: Kind, classes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        self.settings[kind] = super().preprocessor(kind, classes)
        return self.settings[kind]


def write_shrunk(source: Path, out: Path, *, tokens: Mapping[str, int] | None = None, seed: int = 0) -> Path:
    """Write a small checkpoint to the new directory `out`, and return `out`.

    Args:
        source: Directory with a published config.json, and possibly other small files.
        out: The new directory.
        tokens: Ids of special tokens that only a vocabulary would state.
        seed: Seed of the weights.

    Raises:
        InputError: `source` has no config.json, or the family implements its own layers.
        UnsupportedCheckpoint: No family supports the checkpoint, or a setting is not supported.

    """
    if not (source / "config.json").is_file():
        raise InputError(f"{source} has no config.json")
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in _COPIED and not _NOT_COPIED.fullmatch(file.name):
            shutil.copyfile(file, out / file.name)
    has_vocabulary = any((out / name).is_file() for name in VOCABULARIES)
    config = _read_json(out / "config.json")
    if not has_vocabulary:
        named = {**_read_json(out / "special_tokens_map.json"), **_read_json(out / "tokenizer_config.json")}
        special = {**_stated_tokens(config, named), **_listed_tokens(out)}
        special |= TOKENS.get(config.get("model_type", ""), {}) | dict(tokens or {})
        asked = _asked_tokens(out, special)
        write_tokenizer(out, {**special, **asked})
    opened = ConfigOnly.open(out)
    checkpoint = _Recorded(opened.path, opened.config)
    family = family_of(checkpoint)
    translated = family.translated(checkpoint)
    family.processor(translated)
    config, files = translated.contents
    _write_settings(checkpoint, files)
    config = {key: value for key, value in config.items() if key not in _DROPPED}
    if LONG_ROPE in config:  # transformers expects the published settings in their place
        config["rope_scaling"] = config.pop(LONG_ROPE)
    # The heads of Qwen-VL's resampler have a fixed width of 128.
    small = shrunk(config, _complete(family, config), 1 if issubclass(family, PretrainedFamily) else 4)
    if not has_vocabulary:
        _hold_tokens(small, max({**special, **asked}.values()))
    _write_json(out / "config.json", small)
    torch.manual_seed(seed)
    _write_weights(family, out)
    return out


def _write_settings(checkpoint: _Recorded, files: Mapping[str, Any]) -> None:
    """Write the settings that the family has read, those of `files`, and a font if the family has asked for one."""
    out = checkpoint.path
    for name, contents in {**checkpoint.required, **files}.items():
        if contents:
            _write_json(out / name, contents)
    for name in checkpoint.fonts:
        (out / name).write_bytes(ImageFont.load_default(10).font_bytes)
    if "preprocessor_config.json" in checkpoint.assumed:
        parts = {_PARTS[kind]: settings for kind, settings in checkpoint.settings.items()}
        _write_json(out / "processor_config.json", {**checkpoint.json("processor_config.json"), **parts})


def _hold_tokens(config: dict[str, Any], last: int) -> None:
    """Enlarge the vocabulary up to the token `last`, because default values of configurations do not fit together."""
    for section in (config, config.get("text_config", {})):
        if "embedding_size" in section:  # Molmo has embeddings of further tokens
            continue
        if section.get("vocab_size", last + 1) <= last:
            section["vocab_size"] = last + 1


def _complete(family: type[Family], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the defaults of the family's configuration."""
    if not issubclass(family, PretrainedFamily):
        keys: Keys | None = getattr(sys.modules[family.__module__], "KEYS", None)
        return dict(config) if keys is None else keys.complete(config, "config.json")
    complete: dict[str, Any] = family.config_class().from_dict(deepcopy(dict(config))).to_dict()
    return complete


def shrunk(config: Mapping[str, Any], complete: Mapping[str, Any], scale: int = 1) -> dict[str, Any]:
    """Return a config.json with small sizes.

    Args:
        config: Published contents.
        complete: The same contents together with all defaults.
        scale: Factor of all widths.

    """
    small = _small(config, scale)
    for name, section in complete.items():
        if not isinstance(section, Mapping) or name in _ROPE or name.startswith("quantization"):
            continue
        if name in config or name != "text_config":
            if sizes := _new_sizes(section, scale):
                small[name] = {**small.get(name, {}), **sizes}
        else:  # older files have the text model's settings at the top level
            small = {**_new_sizes(section, scale), **small}
    return {**_new_sizes(complete, scale), **small}


def _new_sizes(section: Mapping[str, Any], scale: int) -> dict[str, Any]:
    """Return only the settings of a section that `_small` changes, without the sections in it."""
    small = _small(section, scale)
    return {
        name: value for name, value in small.items() if value != section.get(name) and not isinstance(value, Mapping)
    }


def _small(section: Mapping[str, Any], scale: int) -> dict[str, Any]:
    """Return a section of config.json, and the sections in it, with small sizes."""
    head, rotated = _head(section, scale)
    depth = next((section[name] for name in _DEPTHS if isinstance(section.get(name), int)), 0)
    layers = _num_layers(section)
    small: dict[str, Any] = {}
    for name, value in section.items():
        if name in _QUANTIZED:
            continue
        if isinstance(value, Mapping):
            small[name] = _small_rope(value, head, rotated) if name in _ROPE else _small(value, scale)
        elif name == "num_key_value_heads" and value is not None:
            small[name] = HEADS if value == section.get("num_attention_heads") else 1
        elif name == "head_dim" and value is not None:
            small[name] = head
        elif isinstance(value, list) and name not in _SIZES:
            small[name] = _small_list(name, value, depth, layers)
        else:
            of_layers = isinstance(value, list) and len(value) == depth
            small[name] = _small_number(name, value[:layers] if of_layers else value, layers, scale)
    return small | SECTIONS.get(section.get("model_type", ""), {})


def _num_layers(section: Mapping[str, Any]) -> int:
    """Return how many layers include every type of layer. There are at least two."""
    types = section.get("layer_types") or ()
    periods = (section.get("full_attention_interval") or 0, (section.get("sliding_window_pattern") or 0) + 1)
    return max(2, *periods, *(types.index(one) + 1 for one in {*types}))


def _small_list(name: str, value: list[Any], depth: int, layers: int) -> list[Any]:
    if name.startswith("vision_feature_layer") or name == "vit_layers":
        return [_index(one) for one in value]
    if _INDICES.fullmatch(name):
        return [layers - 1] if len(value) == 1 else [*range(min(layers, len(value)))]
    return value[:layers] if depth and len(value) == depth and not name.startswith("image") else value


def _small_number(name: str, value: Any, layers: int, scale: int) -> Any:
    if not value or isinstance(value, bool | str):  # a part whose size is 0 is not there
        return value
    if name in _DEPTHS or name == "max_window_layers":
        return layers
    if name in ("vision_feature_layer", "insert_layer_id"):
        return _index(value)
    if name not in _SIZES:
        return value
    size = _SIZES[name] * (scale if _SIZES[name] >= _HEAD else 1)
    return [size] * len(value) if isinstance(value, list | tuple) else size


def _index(layer: int) -> int:
    """Return the index of a layer in a tower of two layers."""
    return max(layer, -2) if layer < 0 else min(layer, 1)


def _head(section: Mapping[str, Any], scale: int) -> tuple[int, float]:
    """Return the new width of a head, and the fraction of it that is rotated."""
    ropes = [section[name] for name in _ROPE if isinstance(section.get(name), Mapping)]
    stated = (place.get("partial_rotary_factor") for place in (section, *ropes))
    rotated = next((one for one in stated if one is not None), 1.0)
    return (_PARTLY_ROTATED_HEAD if rotated < 1 and section.get("head_dim") else _HEAD) * scale, rotated


def _small_rope(rope: Mapping[str, Any], head: int, rotated: float) -> dict[str, Any]:
    """Return rotary settings whose sections have the same proportions, and fill half of the rotated part of a head.

    Lists of factors are cut to this length.
    """
    if factors := {name: rope[name] for name in ("long_factor", "short_factor") if isinstance(rope.get(name), list)}:
        return {**rope, **{name: value[: int(head * rotated) // 2] for name, value in factors.items()}}
    name = next((name for name in _SECTIONS if rope.get(name)), None)
    if name is None:
        return {
            name: _small_rope(one, head, rotated) if isinstance(one, Mapping) else one for name, one in rope.items()
        }
    sections = rope[name]
    half = int(head * rotated) // 2
    new = [max(1, section * half // sum(sections)) for section in sections]
    new[-1] += half - sum(new)
    return {**rope, name: new}


def _stated_tokens(config: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, int]:
    """Return a token for each id in config.json.

    Its text is stated in `named`, the contents of tokenizer_config.json. Otherwise, it follows from the key's name.
    """
    found: dict[int, str] = {}
    for section in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for name, value in section.items():
            if (match := _TOKEN.fullmatch(name)) and isinstance(value, int) and value >= 0:
                text = named.get(f"{match[1]}_token") or _USUAL.get(match[1], f"<|{match[1]}|>")
                found.setdefault(value, text["content"] if isinstance(text, Mapping) else text)
    return {text: index for index, text in found.items()}


def _asked_tokens(out: Path, known: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens that the family of a checkpoint without a vocabulary reads by their texts, with ids.

    Tokens that tokenizer_config.json would state are added to this file.
    """
    opened = ConfigOnly.open(out)
    family = family_of(opened)
    family.processor(family.translated(opened))
    if opened.unknown_tokens:
        _write_json(out / "tokenizer_config.json", opened.unknown_tokens)
    free = (index for index in range(5000, 10000) if index not in known.values())
    stated = {index.stated: text for text, index in opened.unknown_ids.items()}
    asked = {text: known.get(text, index.stated) for text, index in opened.unknown_ids.items()}
    # A guess of `_stated_tokens` is wrong if the family compares the id with that of another token.
    asked = {text: index if stated.get(index, text) == text else None for text, index in asked.items()}
    return {text: next(free) if index is None else index for text, index in asked.items()}


def _listed_tokens(folder: Path) -> dict[str, int]:
    """Return the special tokens in tokenizer_config.json and added_tokens.json, with their ids."""
    decoder = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    listed = {entry["content"]: int(index) for index, entry in decoder.items()}
    return {**listed, **_read_json(folder / "added_tokens.json")}


def write_tokenizer(out: Path, special: Mapping[str, int], spelled: tuple[str, ...] = ()) -> None:
    """Write a BPE tokenizer whose tokens are single bytes.

    Args:
        out: Directory of the checkpoint. Its tokenizer_config.json chooses between byte-level BPE and SentencePiece.
        special: Special tokens with their ids.
        spelled: Special tokens that are pieces of the vocabulary instead of added tokens.

    """
    taken = {index: token for token, index in special.items()}  # a later entry names an id more exactly
    special = {token: index for index, token in taken.items()}
    free = (index for index in range(10, 5000) if index not in taken)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [(token[:stop], token[stop]) for token in spelled for stop in range(1, len(token))]
    pieces = [*dict.fromkeys([*pieces, *(token[:stop] for token in spelled for stop in range(1, len(token)))])]
    vocabulary = {piece: next(free) for piece in pieces if piece not in special} | special
    settings = _read_json(out / "tokenizer_config.json")
    if settings.get("tokenizer_class") == "QWenTokenizer":  # its code would be run
        settings = {name: value for name, value in settings.items() if name not in ("tokenizer_class", "auto_map")}
    class_name = settings.get("tokenizer_class")
    is_byte_level = class_name not in {"LlamaTokenizer", "GemmaTokenizer", None} or "<unk>" not in special
    split: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if spelled:  # Fuyu's processor drops the first piece of each encoded text, which is the same for every text
        spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = sorted((index, token) for token, index in special.items() if token not in spelled)
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **entry} for index, token in added],
        "normalizer": None if is_byte_level else spaces,
        "pre_tokenizer": split if is_byte_level else None,
        "post_processor": None,
        "decoder": split if is_byte_level else {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "unk_token": None if is_byte_level else "<unk>",
            "fuse_unk": not is_byte_level,
            "byte_fallback": not is_byte_level,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    _write_json(out / "tokenizer.json", described)
    if class_name is None:
        named = _read_json(out / "special_tokens_map.json")
        _write_json(out / "tokenizer_config.json", {**settings, "tokenizer_class": "TokenizersBackend", **named})


def _write_weights(family: type[Family], out: Path) -> None:
    """Write random weights for the config.json in `out`."""
    checkpoint = ConfigOnly.open(out)
    if not issubclass(family, PretrainedFamily):
        network = _network(family, checkpoint)
        weights = {name: _random(name, tensor) for name, tensor in network.state_dict().items()}
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        return
    stated = (out / "config.json").read_bytes()
    network = family.module_class()(family.configuration(family.translated(checkpoint)))
    network.save_pretrained(out)
    if checkpoint.config["model_type"] == "phi4_multimodal":
        write_adapters(network, out)
    (out / "config.json").write_bytes(stated)  # save_pretrained has written it in the spelling of this release


def _network(family: type[Family], checkpoint: ConfigOnly) -> torch.nn.Module:
    """Return the network, without weights, of a family that implements its own layers."""
    module = sys.modules[family.__module__]
    made: list[torch.nn.Module] = []

    def build(make: Any, *_: Any, **__: Any) -> None:
        with torch.device("meta"):
            made.append(make())
        raise StopIteration

    before, module.__dict__["build"] = module.__dict__["build"], build
    try:
        family.model(checkpoint, family.processor(checkpoint), open_device("cpu"), torch.float32)
    except StopIteration:
        return made[0]
    finally:
        module.__dict__["build"] = before
    raise InputError(f"the family {family.__name__} does not make its network with `build`")


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a random weight. Vectors that scale are close to 1."""
    drawn = torch.randn(tensor.shape) * 0.05
    return drawn + 1 if tensor.ndim == 1 and name.endswith("weight") else drawn


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _write_json(file: Path, contents: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(contents), encoding="utf-8")
