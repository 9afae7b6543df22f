"""The layout of AIDC-AI's Ovis2 checkpoints, whose model_type is ovis. It is translated in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.nn.checkpoint.directory import Checkpoint, with_special_tokens
from mindie_mm.nn.checkpoint.renaming import UNBATCHED, Renaming, third
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD

ORIGINAL = "ovis"
"""model_type of these checkpoints."""
ATOM = "<IMG_ATOM>"
INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
_MAX_TILES = 9
"""Default of the original code, which does not read this number from a file."""
_CLIP: Mapping[str, Any] = {"resample": 3, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "rescale_factor": 1 / 255}
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}{{ '<image>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The original code's QwenConversationFormatter as a template."""
_SERVED: Mapping[str, Any] = {"model_type": ORIGINAL, "conversation_formatter_class": "QwenConversationFormatter"}
_SERVED_LANGUAGE: Mapping[str, Any] = {"model_type": "qwen2"}
_SERVED_VISUAL: Mapping[str, Any] = {"model_type": "aimv2_visual_tokenizer", "drop_cls_token": False}
_SERVED_BACKBONE: Mapping[str, Any] = {"model_type": "aimv2", "qkv_bias": False, "use_bias": False}
_BACKBONE: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
}
_VISUAL: Mapping[str, Any] = {"vocab_size": 16384, "tokenize_function": "softmax", "hidden_stride": 1}
# Settings of the tower and the text model, with the defaults of the original configuration classes.
_VISUAL_KEYS = (
    *("backbone_kwargs", "depths", "tau", "tie_word_embeddings", "use_indicators"),
    *(f"backbone_config.{key}" for key in ("attention_dropout", "projection_dropout", "tie_word_embeddings")),
)
OTHER_KEYS = (
    "disable_tie_weight",  # matters only if the text model ties its weights
    "llm_attn_implementation",
    *(f"visual_tokenizer_config.{key}" for key in _VISUAL_KEYS),
)
"""Keys that do not affect answers."""
_SECTIONS = ("llm_config", "visual_tokenizer_config")
_READ = {*_SECTIONS, *_SERVED, "disable_tie_weight", "hidden_size", "multimodal_max_length"}
_NOT_TEXT = {"attn_implementation", "_attn_implementation", "_attn_implementation_autoset"}
_TOWER, _PUBLISHED_TOWER = r"model\.vision_tower\.transformer\.", "visual_tokenizer.backbone."
_LAYER, _PUBLISHED_LAYER = rf"{_TOWER}encoder\.layers\.(\d+)\.", rf"{_PUBLISHED_TOWER}trunk.blocks.\1."
_RENAMINGS = (
    Renaming(rf"{_TOWER}embeddings\.patch_embedding\.(\w+)", rf"{_PUBLISHED_TOWER}preprocessor.patchifier.proj.\1"),
    Renaming(rf"{_TOWER}embeddings\.rms_norm\.weight", f"{_PUBLISHED_TOWER}preprocessor.patchifier.norm.weight"),
    Renaming(
        rf"{_TOWER}embeddings\.position_embedding\.weight", f"{_PUBLISHED_TOWER}preprocessor.pos_embed", UNBATCHED
    ),
    Renaming(rf"{_TOWER}rms_norm\.weight", f"{_PUBLISHED_TOWER}trunk.post_trunk_norm.weight"),
    *(
        Renaming(rf"{_LAYER}attention\.{part}_proj\.weight", f"{_PUBLISHED_LAYER}attn.qkv.weight", third(index))
        for index, part in enumerate("qkv")
    ),
    *(
        Renaming(rf"{_LAYER}{ours}\.weight", f"{_PUBLISHED_LAYER}{theirs}.weight")
        for ours, theirs in (
            (r"attention\.out_proj", "attn.proj"),
            ("rms_norm1", "norm_1"),
            ("rms_norm2", "norm_2"),
            (r"ffn\.gate_proj", "mlp.fc1"),
            (r"ffn\.down_proj", "mlp.fc2"),
            (r"ffn\.up_proj", "mlp.fc3"),
        )
    ),
    Renaming(r"model\.vision_tower\.head_linear\.weight", "visual_tokenizer.head.0.weight"),
    Renaming(r"model\.vision_tower\.head_norm\.(\w+)", r"visual_tokenizer.head.1.\1"),
    Renaming(r"model\.visual_embeddings_table\.weight", "vte.weight"),
    Renaming(r"model\.language_model\.(.+)", r"llm.model.\1"),
    Renaming(r"lm_head\.weight", "llm.lm_head.weight"),
)


def translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint in transformers' layout.

    Raise UnsupportedCheckpoint for settings that this layout cannot express.
    """
    if checkpoint.renamings is not None or checkpoint.config.get("model_type") != ORIGINAL:
        return checkpoint
    where, config = str(checkpoint.path), checkpoint.config
    language, visual = (_section(config, name, where) for name in _SECTIONS)
    backbone = _section(visual, "backbone_config", where)
    for section, served in (
        (config, _SERVED),
        (language, _SERVED_LANGUAGE),
        (visual, _SERVED_VISUAL),
        (backbone, _SERVED_BACKBONE),
    ):
        check_settings(section, served, where)
    check_settings(config, {"hidden_size": language.get("hidden_size")}, where)
    text = {key: value for key, value in language.items() if key not in _NOT_TEXT}
    tied = bool(text.get("tie_word_embeddings", False)) and not config.get("disable_tie_weight", False)
    if (most := config.get("multimodal_max_length")) and text.get("max_position_embeddings"):
        text["max_position_embeddings"] = min(text["max_position_embeddings"], most)
    vision = {**_stated(backbone, _BACKBONE), **_stated(visual, _VISUAL)}
    described = with_special_tokens(checkpoint.tokenizer_json(), (ATOM, *INDICATORS))
    ids = checkpoint.ids_of(described)
    settings = checkpoint.preprocessor("image", {"CLIPImageProcessor": _CLIP})
    needed = {"do_resize": True, "do_center_crop": False, "do_rescale": True, "do_normalize": True}
    check_settings(settings, needed, where)
    side = vision["image_size"]
    rows = side // vision["patch_size"] // vision["hidden_stride"]
    files = {
        "tokenizer.json": described,
        "processor_config.json": {"image_processor": None, "image_seq_length": rows**2},
        "preprocessor_config.json": {
            **{key: settings[key] for key in _CLIP},
            "image_processor_type": "Ovis2ImageProcessor",
            "size": {"height": side, "width": side},
            "crop_to_patches": True,
            "max_patches": _MAX_TILES,
        },
    }
    translation = {
        **{key: value for key, value in config.items() if key not in _READ},
        "model_type": "ovis2",
        "architectures": None,
        "text_config": {**text, "tie_word_embeddings": tied},
        "vision_config": vision,
        "image_token_id": ids[ATOM],
        "visual_indicator_token_ids": [ids[token] for token in INDICATORS],
        "hidden_size": text.get("hidden_size"),
        "vocab_size": text.get("vocab_size"),
        "tie_word_embeddings": tied,
    }
    return checkpoint.translated(translation, files, _RENAMINGS)


def _section(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(section := config.get(name), Mapping):
        raise UnsupportedCheckpoint(f"{where}: {name}={section!r} in config.json must be an object")
    return section


def _stated(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: default if section.get(key) is None else section[key] for key, default in defaults.items()}
