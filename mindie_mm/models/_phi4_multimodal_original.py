"""The layout in which Microsoft publishes Phi-4-multimodal, whose model_type is phi4mm.

It is translated in memory by the rules of transformers' convert_phi4_multimodal_weights_to_hf.py. The weights contain
the adapters, and the tokenizer spells the placeholders as reserved tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.renaming import Renaming

ORIGINAL = "phi4mm"
"""model_type of these checkpoints."""
_TOKENS = {"image": "<|endoftext10|>", "audio": "<|endoftext11|>"}
"""Texts of the placeholder tokens."""
_TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
"""Sizes of the vision tower, which are in the original code instead of config.json."""
_AUDIO_NAMES = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}
"""Names of audio settings in transformers' layout, by their original names."""
_AUDIO_SAME = (
    *("activation", "chunk_size", "conv_activation", "conv_glu_type", "depthwise_multiplier", "dropout_rate"),
    *("ext_pw_out_channel", "input_size", "kernel_size", "left_chunk", "num_blocks", "time_reduction"),
)
_AUDIO_NEEDED = {
    "batch_norm": False,
    "bias_in_glu": True,
    "causal": True,
    "cnn_layer_norm": True,
    "ext_pw_kernel_size": 1,
    "input_layer": "nemo_conv",
}
_TEXT_NEEDED = {
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "img_processor": None,
}
_TRANSLATED = {"embd_layer", "audio_processor", *_TEXT_NEEDED}
"""Keys of the original config.json that transformers' configuration expresses differently, or not at all."""
_IMAGE_NEEDED = {
    "embedding_cls": "tune_image",
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}
_CLIP_NEEDED = {"embedding_cls": "audio", "projection_cls": "mlp", "use_conv_downsample": False, "use_qformer": False}
_EMBEDDING = r"model\.embed_tokens_extend\."
_PUBLISHED = "model.embed_tokens_extend."
_ENCODER = rf"{_EMBEDDING}audio_embed\.encoder\.encoders\.(\d+)\."
_PUBLISHED_ENCODER = rf"{_PUBLISHED}audio_embed.encoder.encoders.\1."
_RENAMINGS = (
    Renaming(r"model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)\.weight", r"model.layers.\1.\2.\3.base_layer.weight"),
    Renaming(
        rf"{_ENCODER}feed_forward_(in|out)\.gate_up_proj\.(\w+)",
        rf"{_PUBLISHED_ENCODER}feed_forward_\2.net.0.linear.\3",
    ),
    Renaming(rf"{_ENCODER}feed_forward_(in|out)\.down_proj\.(\w+)", rf"{_PUBLISHED_ENCODER}feed_forward_\2.net.2.\3"),
    Renaming(rf"{_ENCODER}self_attn\.([qkv])_proj\.(\w+)", rf"{_PUBLISHED_ENCODER}self_attn.linear_\2.\3"),
    Renaming(rf"{_ENCODER}self_attn\.o_proj\.(\w+)", rf"{_PUBLISHED_ENCODER}self_attn.linear_out.\2"),
    Renaming(rf"{_EMBEDDING}image_embed\.img_projection_up\.(\w+)", rf"{_PUBLISHED}image_embed.img_projection.0.\1"),
    Renaming(rf"{_EMBEDDING}image_embed\.img_projection_down\.(\w+)", rf"{_PUBLISHED}image_embed.img_projection.2.\1"),
    Renaming(rf"{_EMBEDDING}image_embed\.global_img_feature_extensor", f"{_PUBLISHED}image_embed.glb_GN"),
    Renaming(rf"{_EMBEDDING}image_embed\.sub_img_feature_extensor", f"{_PUBLISHED}image_embed.sub_GN"),
    *(
        Renaming(
            rf"{_EMBEDDING}audio_embed\.{half}_proj_for_{ours}\.(\w+)",
            rf"{_PUBLISHED}audio_embed.audio_projection.{theirs}.{index}.\1",
        )
        for half, index in (("up", 0), ("down", 2))
        for ours, theirs in (("speech", "speech"), ("vision_speech", "vision"))
    ),
)


def translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint in transformers' layout.

    Raise UnsupportedCheckpoint for settings that this layout cannot express.
    """
    if checkpoint.renamings is not None or checkpoint.config.get("model_type") != ORIGINAL:
        return checkpoint
    where, config = str(checkpoint.path), checkpoint.config
    check_settings(config, _TEXT_NEEDED, where)
    embedding = _section(config, "embd_layer", where)
    check_settings(embedding, {"embedding_cls": "image_audio"}, f"{where} (embd_layer)")
    image, clip = (_section(embedding, f"{kind}_embd_layer", where) for kind in ("image", "audio"))
    check_settings(image, _IMAGE_NEEDED, f"{where} (image_embd_layer)")
    check_settings(clip, _CLIP_NEEDED, f"{where} (audio_embd_layer)")
    check_settings(
        audio := _section(config, "audio_processor", where), {"name": "cascades"}, f"{where} (audio_processor)"
    )
    tokens = {kind: checkpoint.token_id(token) for kind, token in _TOKENS.items()}
    translated = {
        **{key: value for key, value in config.items() if key not in _TRANSLATED},
        "model_type": "phi4_multimodal",
        "architectures": ["Phi4MultimodalForCausalLM"],
        "vision_config": {**_TOWER, "crop_size": image.get("crop_size", 448), "image_token_id": tokens["image"]},
        "audio_config": {
            **_audio_config(_section(audio, "config", where), where),
            "downsample_rate": clip.get("downsample_rate", 1),
            "audio_token_id": tokens["audio"],
        },
    }
    return checkpoint.translated(translated, {}, _RENAMINGS)


def _audio_config(audio: Mapping[str, Any], where: str) -> dict[str, Any]:
    where = f"{where} (audio_processor)"
    check_settings(audio, _AUDIO_NEEDED, where)
    bias = _section(audio, "relative_attention_bias_args", where)
    check_settings(bias, {"type": "t5", "t5_bias_symmetric": False}, where)
    check_settings(_section(audio, "encoder_embedding_config", where), {"input_size": audio.get("input_size")}, where)
    return {
        **{name: audio[name] for name in _AUDIO_SAME if name in audio},
        **{ours: audio[name] for name, ours in _AUDIO_NAMES.items() if name in audio},
        "nemo_conv_channels": _section(audio, "nemo_conv_settings", where).get("conv_channels", 1024),
        "bias_max_distance": bias.get("t5_bias_max_distance", 1000),
    }


def _section(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(section := config.get(name), Mapping):
        raise UnsupportedCheckpoint(f"{where}: config.json has no section {name}. Copy it from the original repository")
    return section
