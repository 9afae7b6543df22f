"""The layout of OpenGVLab's InternVL checkpoints, whose model_type is internvl_chat.

It is translated in memory by the rules of transformers' convert_internvl_weights_to_hf.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.nn.checkpoint.directory import Checkpoint, with_special_tokens
from mindie_mm.nn.checkpoint.renaming import Renaming, grouped, third
from mindie_mm.nn.pixels import IMAGENET_MEAN, IMAGENET_STD

ORIGINAL = "internvl_chat"
"""model_type of these checkpoints."""
_CONVERTED = "use a repository in transformers' layout, such as OpenGVLab/InternVL3-1B-hf"
_SPELLED = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
"""Texts of special tokens in OpenGVLab's layout.

The original tokenizer has the first three tokens. The fourth occurs only in prompts and is replaced before encoding.
"""
_CHAT_DEFAULTS: Mapping[str, Any] = {
    "select_layer": -1,
    "force_image_size": None,
    "downsample_ratio": 0.5,
    "dynamic_image_size": False,
    "use_thumbnail": False,
    "ps_version": "v1",
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "pad2square": False,
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
}
"""Defaults of the original configuration class."""
_TRANSLATED = {*_CHAT_DEFAULTS, "template", "vision_config", "llm_config"}
"""Keys of the original config.json that transformers' configuration expresses differently."""
_VISION_DEFAULTS: Mapping[str, Any] = {
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 224,
    "qkv_bias": False,
    "hidden_size": 3200,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "qk_normalization": True,
    "num_hidden_layers": 48,
    "hidden_act": "gelu",
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
}
"""Defaults of the original tower. transformers has different defaults."""
_INTERNLM2 = "InternLM2ForCausalLM"
_TEXT_MODELS = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    _INTERNLM2: "llama",
}
"""transformers' model_type of each supported language model, by the name of its class in the original layout."""
_INTERNLM2_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 103168,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "bias": True,
}
"""Defaults of the InternLM2 configuration class."""
_ATTENTION_KEYS = {"attn_implementation", "_attn_implementation", "_attn_implementation_autoset"}
_CHATML = ("internvl2_5", "internlm2-chat", "Hermes-2")
"""Conversation templates of the original code that enclose turns in <|im_start|> and <|im_end|>."""
_TURN_END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template of transformers' conversion script. It adds no system message."""
_LAYER = r"model\.vision_tower\.encoder\.layer\.(\d+)\."
_PUBLISHED_LAYER = r"vision_model.encoder.layers.\1"
_RENAMINGS = (
    Renaming(r"model\.vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    Renaming(r"model\.vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    Renaming(
        r"model\.vision_tower\.embeddings\.patch_embeddings\.projection\.(\w+)",
        r"vision_model.embeddings.patch_embedding.\1",
    ),
    *(
        Renaming(rf"{_LAYER}attention\.{part}_proj\.(\w+)", rf"{_PUBLISHED_LAYER}.attn.qkv.\2", third(index))
        for index, part in enumerate("qkv")
    ),
    Renaming(rf"{_LAYER}attention\.projection_layer\.(\w+)", rf"{_PUBLISHED_LAYER}.attn.proj.\2"),
    Renaming(rf"{_LAYER}attention\.([qk]_norm)\.(\w+)", rf"{_PUBLISHED_LAYER}.attn.\2.\3"),
    Renaming(rf"{_LAYER}layernorm_before\.(\w+)", rf"{_PUBLISHED_LAYER}.norm1.\2"),
    Renaming(rf"{_LAYER}layernorm_after\.(\w+)", rf"{_PUBLISHED_LAYER}.norm2.\2"),
    Renaming(rf"{_LAYER}lambda_(\d)", rf"{_PUBLISHED_LAYER}.ls\2"),
    Renaming(rf"{_LAYER}mlp\.(.+)", rf"{_PUBLISHED_LAYER}.mlp.\2"),
    Renaming(r"model\.multi_modal_projector\.layer_norm\.(\w+)", r"mlp1.0.\1"),
    Renaming(r"model\.multi_modal_projector\.linear_1\.(\w+)", r"mlp1.1.\1"),
    Renaming(r"model\.multi_modal_projector\.linear_2\.(\w+)", r"mlp1.3.\1"),
)
_LANGUAGE_RENAMINGS = (
    Renaming(r"model\.language_model\.(.+)", r"language_model.model.\1"),
    Renaming(r"lm_head\.weight", "language_model.lm_head.weight"),
)
_INTERNLM2_LAYER = r"model\.language_model\.layers\.(\d+)\."
_INTERNLM2_PUBLISHED_LAYER = r"language_model.model.layers.\1"
_INTERNLM2_RENAMINGS = (
    Renaming(r"model\.language_model\.embed_tokens\.weight", "language_model.model.tok_embeddings.weight"),
    Renaming(rf"{_INTERNLM2_LAYER}self_attn\.o_proj\.(\w+)", rf"{_INTERNLM2_PUBLISHED_LAYER}.attention.wo.\2"),
    *(
        Renaming(rf"{_INTERNLM2_LAYER}{ours}\.weight", rf"{_INTERNLM2_PUBLISHED_LAYER}.{theirs}.weight")
        for ours, theirs in (
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.down_proj", "feed_forward.w2"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        )
    ),
    Renaming(r"lm_head\.weight", "language_model.output.weight"),
    _LANGUAGE_RENAMINGS[0],
)


def translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint in transformers' layout.

    Raise UnsupportedCheckpoint for settings that this layout cannot express.
    """
    if checkpoint.renamings is not None or checkpoint.config.get("model_type") != ORIGINAL:
        return checkpoint
    where, config = str(checkpoint.path), checkpoint.config
    settings = {**_CHAT_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    vision = _vision_config(settings, where)
    text = _text_config(config.get("llm_config") or {}, where)
    _check_chat(settings, vision, where)
    described = with_special_tokens(_tokenizer_json(checkpoint), [_SPELLED["video_token"]])
    ids = checkpoint.ids_of(described)
    if missing := [token for token in (*_SPELLED.values(), _TURN_END) if token not in ids]:
        raise UnsupportedCheckpoint(f"{where}: the tokenizer has no added token {missing[0]}")
    translated = {
        **{key: value for key, value in config.items() if key not in _TRANSLATED},
        "model_type": "internvl",
        "architectures": None,
        "vision_config": vision,
        "text_config": text,
        "image_token_id": ids[_SPELLED["context_image_token"]],
        "downsample_ratio": settings["downsample_ratio"],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }
    side = vision["image_size"]
    pixels = {
        "size": {"height": side, "width": side},
        "resample": 3,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }
    tiled = settings["dynamic_image_size"]
    bounds = {f"{end}_patches": settings[f"{end}_dynamic_patch"] if tiled else 1 for end in ("min", "max")}
    generation = checkpoint.json("generation_config.json")
    stated = generation.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    files = {
        # The original code always ends an answer at the end of the turn.
        "generation_config.json": {**generation, "eos_token_id": [*ends, *({ids[_TURN_END]} - {*ends})]},
        # The original code hard-codes its preprocessing settings and reads no preprocessor files.
        "processor_config.json": {"image_processor": None},
        "preprocessor_config.json": {"image_processor_type": "GotOcr2ImageProcessor", **pixels, **bounds},
        "video_preprocessor_config.json": pixels,
        "tokenizer.json": described,
        "tokenizer_config.json": {**checkpoint.json("tokenizer_config.json"), **_SPELLED},
    }
    return checkpoint.translated(translated, files, (*_RENAMINGS, *_language_renamings(config["llm_config"], text)))


def _check_chat(settings: Mapping[str, Any], vision: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint for original settings that transformers' layout cannot express."""
    served = {
        "select_layer": -1,
        "ps_version": "v2",
        "pad2square": False,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        # Any other size would require interpolated position embeddings.
        "force_image_size": vision["image_size"],
    }
    if settings["dynamic_image_size"] and settings["max_dynamic_patch"] > 1:
        served["use_thumbnail"] = True
    for name, value in served.items():
        if (given := settings[name]) is not None and given != value:
            raise UnsupportedCheckpoint(
                f"{where}: {name} is {given!r}; with model_type {ORIGINAL}, only {value!r} is supported; {_CONVERTED}"
            )
    if (template := settings.get("template")) not in _CHATML:
        raise UnsupportedCheckpoint(
            f"{where}: template is {template!r}; with model_type {ORIGINAL}, only {', '.join(_CHATML)} are "
            f"supported; {_CONVERTED}"
        )


def _vision_config(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the original vision_config into transformers' vision_config.

    Raise UnsupportedCheckpoint for settings that transformers cannot express.
    """
    stated = settings.get("vision_config") or {}
    if (tower := stated.get("model_type", "intern_vit_6b")) != "intern_vit_6b":
        raise UnsupportedCheckpoint(
            f"{where}: vision_config.model_type is {tower!r}; with model_type {ORIGINAL}, only 'intern_vit_6b' "
            f"is supported; {_CONVERTED}"
        )
    vision = {key: default if (own := stated.get(key)) is None else own for key, default in _VISION_DEFAULTS.items()}
    bias, normalized = vision.pop("qkv_bias"), vision.pop("qk_normalization")
    if normalized:  # transformers hard-codes this epsilon in the query and key norms
        check_settings(vision, {"layer_norm_eps": 1e-6}, f"{where} (vision_config)")
    return {"model_type": "internvl_vision", "attention_bias": bias, "use_qk_norm": normalized, **vision}


def _text_config(language: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the original llm_config into transformers' text_config.

    Raise UnsupportedCheckpoint if the language model is not supported.
    """
    name = next(iter(language.get("architectures") or ()), None)
    if name not in _TEXT_MODELS:
        raise UnsupportedCheckpoint(
            f"{where}: the architecture in llm_config is {name}; with model_type {ORIGINAL}, only "
            f"{', '.join(_TEXT_MODELS)} are supported; {_CONVERTED}"
        )
    text = {key: value for key, value in language.items() if key not in _ATTENTION_KEYS}
    if name == _INTERNLM2:
        text = {**_INTERNLM2_DEFAULTS, **text}
        text["attention_bias"] = text.pop("bias")
    return {**text, "model_type": _TEXT_MODELS[name]}


def _language_renamings(language: Mapping[str, Any], text: Mapping[str, Any]) -> Sequence[Renaming]:
    """Return the renamings of the language model's weights. `text` is its configuration in transformers."""
    if language["architectures"][0] != _INTERNLM2:
        return _LANGUAGE_RENAMINGS
    heads = text["num_attention_heads"]
    queries, width = heads // (text.get("num_key_value_heads") or heads), text["hidden_size"] // heads
    parts = {"q": slice(queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}
    return (
        *(
            Renaming(
                rf"{_INTERNLM2_LAYER}self_attn\.{name}_proj\.(\w+)",
                rf"{_INTERNLM2_PUBLISHED_LAYER}.attention.wqkv.\2",
                grouped(part, queries, width),
            )
            for name, part in parts.items()
        ),
        *_INTERNLM2_RENAMINGS,
    )


def _tokenizer_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the contents of tokenizer.json, or convert a Qwen2 tokenizer from vocab.json and merges.txt.

    Raise UnsupportedCheckpoint if neither is possible.
    """
    if checkpoint.has("tokenizer.json"):
        return checkpoint.json("tokenizer.json")
    name = checkpoint.json("tokenizer_config.json").get("tokenizer_class")
    is_qwen2 = str(name).removesuffix("Fast") == "Qwen2Tokenizer"
    if not (is_qwen2 and checkpoint.has("vocab.json") and checkpoint.has("merges.txt")):
        if is_qwen2:
            files = "tokenizer.json, and does not have both vocab.json and merges.txt"
        elif name is None:
            files = "tokenizer.json, and no tokenizer_config.json with a tokenizer_class"
        else:
            files = f"tokenizer.json, which the tokenizer class {name} requires"
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has no {files}; copy the missing files from the original repository, or {_CONVERTED}"
        )
    from transformers import Qwen2Tokenizer  # imported late, because it is slow to import

    checkpoint.check_tokenizer()
    try:
        tokenizer = Qwen2Tokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} has no readable tokenizer: {error}") from error
    described: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return described
