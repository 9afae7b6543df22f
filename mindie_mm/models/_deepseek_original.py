"""The layout of deepseek-ai's DeepSeek-VL checkpoints, whose model_type is multi_modality.

It is translated in memory by the rules of transformers' convert_deepseek_vl_weights_to_hf.py and
convert_deepseek_vl_hybrid_weights_to_hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.image.preprocess import background_of, check_settings
from mindie_mm.nn.checkpoint.config_keys import Nullable
from mindie_mm.nn.checkpoint.directory import Checkpoint, with_special_tokens
from mindie_mm.nn.checkpoint.end_tokens import tokenizers_eos
from mindie_mm.nn.checkpoint.renaming import UNBATCHED, Renaming, third
from mindie_mm.nn.pixels import HALF

ORIGINAL = "multi_modality"
"""model_type of checkpoints in deepseek-ai's layout."""
UNUSED_WEIGHTS = (
    "vision_model.*attn_pool.*",  # pools an image into one feature, which is not used
    "vision_model.high_layer_norm.*",  # never called
    "vision_model.low_layer_norm.*",
    "language_model.model.layers.*.rotary_emb.inv_freq",
)
"""Weights in deepseek-ai's layout that its own code does not use."""
_SIGLIPS: Mapping[str, Mapping[str, Any]] = {
    "siglip_large_patch16_384": {"width": 1024, "layers": 24, "heads": 16, "patch_size": 16, "mlp_ratio": 4.0},
    "siglip_so400m_patch14_384": {"width": 1152, "layers": 27, "heads": 16, "patch_size": 14, "mlp_ratio": 3.7362},
    "siglip_so400m_patch14_224": {"width": 1152, "layers": 27, "heads": 16, "patch_size": 14, "mlp_ratio": 3.7362},
}
"""Sizes of the towers, by name. Sizes that config.json states for a tower take precedence."""
V2_SIZES: Mapping[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_shared_experts": Nullable(int),
    "n_routed_experts": Nullable(int),
    "num_experts_per_tok": Nullable(int),
    "n_group": Nullable(int),
    "topk_group": Nullable(int),
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""Keys that all families with the decoder of DeepSeek-V2 read, with the defaults of the original code."""
_IMAGE_TAG = "<image_placeholder>"


def siglip_renamings(tower: str) -> tuple[Renaming, ...]:
    """Return the renamings of SigLIP's weights. `tower` is the name of the tower in the original layout."""
    layer = r"model\.vision_model\.encoder\.layers\.(\d+)\."
    return (
        Renaming(r"model\.vision_model\.embeddings\.position_embedding\.weight", rf"{tower}.pos_embed", UNBATCHED),
        Renaming(r"model\.vision_model\.embeddings\.patch_embedding\.(\w+)", rf"{tower}.patch_embed.proj.\1"),
        *(
            Renaming(rf"{layer}self_attn\.{part}_proj\.(\w+)", rf"{tower}.blocks.\1.attn.qkv.\2", third(index))
            for index, part in enumerate("qkv")
        ),
        Renaming(rf"{layer}self_attn\.out_proj\.(\w+)", rf"{tower}.blocks.\1.attn.proj.\2"),
        Renaming(rf"{layer}layer_norm(\d)\.(\w+)", rf"{tower}.blocks.\1.norm\2.\3"),
        Renaming(rf"{layer}mlp\.(\w+)\.(\w+)", rf"{tower}.blocks.\1.mlp.\2.\3"),
        Renaming(r"model\.vision_model\.post_layernorm\.(\w+)", rf"{tower}.norm.\1"),
    )


LANGUAGE_RENAMINGS = (
    Renaming(r"model\.language_model\.(.+)", r"language_model.model.\1"),
    Renaming(r"lm_head\.weight", "language_model.lm_head.weight"),
)
CHAT_TEMPLATE = """\
You are a helpful language and vision assistant. You are able to understand the visual content that the user provides, \
and assist the user with a variety of tasks using natural language.

{% for message in messages %}
{%- set role = message.role | capitalize %}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content %}
{%- set said = namespace(text='', after_text=false) %}
{%- for part in parts %}
{%- if part.type == 'text' %}
{%- set text = part.text.lstrip() if loop.first else part.text %}
{%- set text = text.rstrip() if loop.last else text %}
{%- set said.text = said.text + (' ' if said.after_text else '') + text %}
{%- elif part.type == 'image' %}
{%- set said.text = said.text + '<image_placeholder>' %}
{%- endif %}
{%- set said.after_text = part.type == 'text' %}
{%- endfor %}
{%- set open = loop.last and not add_generation_prompt %}
{{- role }}:{{ '' if role == 'Assistant' and open and said.text == '' else ' ' }}{{ said.text }}
{%- if not open %}{{ '\n\n' if role == 'User' else '<\uff5cend\u2581of\u2581sentence\uff5c>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
"""deepseek-ai's conversation format `deepseek`.

For messages with several parts, the template follows transformers' conversion script.
"""


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json in deepseek-ai's layout describes a model with two towers."""
    return config.get("model_type") == ORIGINAL and "Hybrid" in str((config.get("vision_config") or {}).get("cls"))


def check_original(config: Mapping[str, Any], tower: str, projector: str, where: str) -> None:
    """Raise UnsupportedCheckpoint unless a config.json in deepseek-ai's layout names these classes."""
    if made := sorted(key for key in config if key.startswith("gen_")):
        raise UnsupportedCheckpoint(
            f"{where} is a Janus model, because its config.json has {made[0]}; among "
            f"checkpoints with model_type {ORIGINAL}, only DeepSeek's models without image generation are supported"
        )
    vision, aligner, language = (config[f"{part}_config"] for part in ("vision", "aligner", "language"))
    stated = {
        "vision_config.cls": vision["cls"].rpartition(".")[2],
        "aligner_config.cls": aligner["cls"].rpartition(".")[2],
        "aligner_config.params.projector_type": aligner["params"]["projector_type"],
        "aligner_config.params.depth": aligner["params"].get("depth", 1),
        "language_config.model_type": language.get("model_type"),
    }
    served = (tower, "MlpProjector", projector, 2, "llama")
    check_settings(stated, dict(zip(stated, served, strict=True)), where)


def check_aligner(config: Mapping[str, Any], tower: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint unless the projector fits the SigLIP `tower` and the language model."""
    params, width = config["aligner_config"]["params"], config["language_config"].get("hidden_size", 4096)
    for key, needed in (("input_dim", tower["hidden_size"]), ("n_embed", width)):
        if params[key] != needed:
            raise UnsupportedCheckpoint(f"{where}: aligner_config.params.{key}={params[key]} must be {needed}")


def check_features(params: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint if the original tower would drop its first patch."""
    if (configured := params.get("select_feature", "patch")) not in ("same", "cls_patch"):
        raise UnsupportedCheckpoint(f"{where}: select_feature is {configured!r}; only same and cls_patch are supported")


def siglip_config(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the original parameters of a SigLIP tower into transformers' configuration.

    Raise UnsupportedCheckpoint if the tower is not supported.
    """
    name = params.get("model_name", "siglip_large_patch16_384")
    if name not in _SIGLIPS:
        raise UnsupportedCheckpoint(f"{where}: the tower is {name!r}; only {', '.join(_SIGLIPS)} are supported")
    check_settings(params, {"ignore_head": True}, f"{where} (vision_config.params)")
    check_features(params, f"{where} (vision_config.params)")
    sizes = {key: params.get(key, size) for key, size in _SIGLIPS[name].items()}
    layers, last = sizes["layers"], params.get("select_layer", -2)
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": sizes["width"],
        "intermediate_size": int(sizes["width"] * sizes["mlp_ratio"]),
        "num_hidden_layers": min(layers, last if last > 0 else layers + last + 1),
        "num_attention_heads": sizes["heads"],
        "image_size": params.get("image_size", 336),
        "patch_size": sizes["patch_size"],
        "hidden_act": "gelu",
        "vision_use_head": False,
    }


def normalization(pixels: Mapping[str, Any], towers: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Return the normalization settings of transformers' image processor.

    In the original code, either the processor or the towers normalize images.

    Args:
        pixels: Contents of the original preprocessor_config.json.
        towers: Parameters of each tower, by the prefix of its settings. The images of the first tower are padded.
        where: Path of the checkpoint, for messages.

    Raises:
        UnsupportedCheckpoint: Images would be normalized twice or for one tower only, or the color of the padding is
            not the mean.

    """
    own = pixels.get("do_normalize", True)
    mean, std = pixels.get("image_mean") or HALF, pixels.get("image_std") or HALF
    inner = {prefix: params.get("pixel_mean") is not None for prefix, params in towers.items()}
    if len(set(inner.values())) > 1 or (own and any(inner.values())):
        raise UnsupportedCheckpoint(
            f"{where}: do_normalize is {own} in preprocessor_config.json, and {sum(inner.values())} of "
            f"{len(inner)} towers have a pixel_mean; images must be normalized either by the preprocessor or "
            "by all towers"
        )
    settings: dict[str, Any] = {"do_normalize": own or any(inner.values())}
    for prefix, params in towers.items():
        settings[f"{prefix}image_mean"] = params["pixel_mean"] if inner[prefix] else mean
        settings[f"{prefix}image_std"] = params["pixel_std"] if inner[prefix] else std
    padded = next(iter(towers))
    if (used := background_of(settings[f"{padded}image_mean"])) != (stated := background_of(mean)):
        raise UnsupportedCheckpoint(
            f"{where}: image_mean in preprocessor_config.json gives the padding color {stated}, but the "
            f"tower's pixel_mean gives {used}"
        )
    return settings


def original_pixels(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the contents of preprocessor_config.json.

    Raise UnsupportedCheckpoint if it is not in deepseek-ai's layout.
    """
    pixels = checkpoint.require("preprocessor_config.json", ("image_size",))
    check_settings(pixels, {"image_processor_type": "VLMImageProcessor"}, str(checkpoint.path))
    return pixels


def translate(
    checkpoint: Checkpoint,
    model_type: str,
    towers: Mapping[str, Mapping[str, Any]],
    pixels: Mapping[str, Any],
    renamings: Sequence[Renaming],
) -> Checkpoint:
    """Translate a checkpoint from deepseek-ai's layout into transformers' layout.

    Args:
        checkpoint: Checkpoint in deepseek-ai's layout, which `check_original` has checked.
        model_type: model_type in transformers.
        towers: Configurations of the towers, by their names in config.json.
        pixels: Contents of the translated preprocessor_config.json. Settings that the original code hard-codes may be
            missing.
        renamings: Renamings from the names in transformers to the published names of the weights.

    Raises:
        UnsupportedCheckpoint: A setting of the processor or of the tokenizer is not supported.

    """
    where, config = str(checkpoint.path), checkpoint.config
    processor_config = checkpoint.json("processor_config.json")
    check_settings(
        processor_config,
        {"add_special_token": False, "sft_format": "deepseek", "image_tag": _IMAGE_TAG},
        f"{where} (processor_config.json)",
    )
    described = _framed(with_special_tokens(checkpoint.tokenizer_json(), [_IMAGE_TAG]), checkpoint)
    ids = checkpoint.ids_of(described)
    language = config["language_config"]
    translated = {
        **{key: value for key, value in config.items() if not key.endswith("_config") or key.startswith("quant")},
        "model_type": model_type,
        "architectures": None,
        "text_config": {**language, "model_type": "llama"},
        **towers,
        "image_token_id": ids[_IMAGE_TAG],
        "tie_word_embeddings": language.get("tie_word_embeddings", False),
    }
    generation = dict(checkpoint.json("generation_config.json"))
    # The original code stops at the tokenizer's end token. language_config has Llama's default, a different token.
    if generation.get("eos_token_id") is None:
        eos = tokenizers_eos(checkpoint)
        generation["eos_token_id"] = (
            checkpoint.token_id(checkpoint.require_special_token("eos_token")) if eos is None else eos
        )
    files = {
        "processor_config.json": {"num_image_tokens": processor_config.get("num_image_tokens", 576)},
        "preprocessor_config.json": dict(pixels),
        "generation_config.json": generation,
        "tokenizer.json": described,
    }
    return checkpoint.translated(translated, files, renamings)


def _framed(described: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a tokenizer.json that adds BOS and EOS to text as tokenizer_config.json specifies.

    The original tokenizer class reads these settings from tokenizer_config.json only.
    """
    stated = checkpoint.json("tokenizer_config.json")
    if "add_bos_token" not in stated:
        return described
    ids = checkpoint.ids_of(described)
    frame: list[list[dict[str, Any]]] = []
    for name, default in (("bos", True), ("eos", False)):
        token = checkpoint.special_token(f"{name}_token") if stated.get(f"add_{name}_token", default) else None
        if token is not None and token not in ids:
            raise UnsupportedCheckpoint(f"{checkpoint.path}: tokenizer.json has no added token {token}")
        frame.append([{"SpecialToken": {"id": token, "type_id": 0}}] if token else [])
    first, last = frame
    used = [part["SpecialToken"]["id"] for part in (*first, *last)]
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in used},
    }
    return {**described, "post_processor": processor}
