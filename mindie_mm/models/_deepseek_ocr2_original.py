"""The layout of deepseek-ai's DeepSeek-OCR-2 checkpoints, whose model_type is that of DeepSeek-VL2.

config.json and processor_config.json are translated in memory. transformers renames the published weights itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models._deepseek_original import V2_SIZES
from mindie_mm.nn.checkpoint.config_keys import Keys, words
from mindie_mm.nn.checkpoint.directory import Checkpoint

TOWER = "deepencoderv2"
_IMAGE = "<image>"
_ENCODER: Mapping[str, Any] = {
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "rope_theta": 1_000_000.0,
}
"""Sizes of the tower's second half, which the original code does not read from config.json."""
# The original code builds the decoder from the top level. Defaults come from its DeepseekV2Config.
_TEXT = Keys(
    read={**V2_SIZES, "topk_method": "greedy"},
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
        "rope_scaling": (),
        "scoring_func": ("softmax",),
        "tie_word_embeddings": (False,),
        "topk_method": ("greedy", "group_limited_greedy"),
        "use_mla": (False,),
    },
    unused=words(
        "attention_dropout aux_loss_alpha ep_size kv_lora_rank lm_head q_lora_rank qk_nope_head_dim qk_rope_head_dim",
        "rm_head seq_aux v_head_dim",
    ),
)
_SAM = {"width": 768, "layers": 12, "heads": 12, "global_attn_indexes": [2, 5, 8, 11], "downsample_channels": [512]}
KEYS = Keys(
    read=_TEXT.read,
    only={**_TEXT.only, "tile_tag": ("2D",)},
    unused=_TEXT.unused | words("candidate_resolutions global_view_pos"),
    sections={
        "language_config": Keys(unused=_TEXT.unused | _TEXT.read.keys() | _TEXT.only.keys()),
        "projector_config": Keys(read={"input_dim": 896, "n_embed": 1280}, only={"projector_type": ("linear",)}),
        "vision_config": Keys(
            only={"image_size": (1024,), "model_name": (TOWER,)},
            unused=words("mlp_ratio"),
            sections={"width": Keys(sections={"qwen2-0-5b": Keys(read={"dim": 896}), "sam_vit_b": Keys(read=_SAM)})},
        ),
    },
)
_PROCESSOR_KEYS = Keys(
    read={
        "downsample_ratio": 4,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "patch_size": 16,
    },
    only={"image_token": (_IMAGE,), "normalize": (True,)},
)


def translate(checkpoint: Checkpoint) -> Checkpoint:
    """Translate a checkpoint from deepseek-ai's layout into transformers' layout.

    Raise UnsupportedCheckpoint for settings that this layout cannot express.
    """
    where = f"{checkpoint.path}/config.json"
    config = KEYS.complete(checkpoint.config, where)
    text = _text_config(config, where)
    width = config["vision_config"]["width"]
    for name, value, needed in (
        ("input_dim", config["projector_config"]["input_dim"], width["qwen2-0-5b"]["dim"]),
        ("n_embed", config["projector_config"]["n_embed"], text["hidden_size"]),
    ):
        if value != needed:
            raise UnsupportedCheckpoint(f"{where}: projector_config.{name}={value} must be {needed}")
    pixels = checkpoint.require("processor_config.json", ("patch_size", "downsample_ratio"))
    pixels = _PROCESSOR_KEYS.complete(pixels, f"{checkpoint.path}/processor_config.json")
    kept: dict[str, Any] = {
        key: config[key] for key in ("torch_dtype", "dtype", "quantization_config") if key in config
    }
    translation: dict[str, Any] = {
        "model_type": "deepseek_ocr2",
        "text_config": text,
        "vision_config": _vision_config(width, pixels["patch_size"]),
        "image_token_id": checkpoint.token_id(_IMAGE),
        **kept,
    }
    processor = {
        **{key: pixels[key] for key in ("patch_size", "downsample_ratio")},
        "image_processor": {key: pixels[key] for key in ("image_mean", "image_std")},
    }
    return checkpoint.translated(translation, {"processor_config.json": processor}, ())


def _text_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    text = {key: config[key] for key in _TEXT.read}
    for key, value in config["language_config"].items():
        if text.get(key, value) != value:
            raise UnsupportedCheckpoint(
                f"{where}: language_config.{key} is {value}; {key} at the top level is {text[key]}"
            )
    dense = text.pop("first_k_dense_replace")
    sparse = text["num_hidden_layers"] - dense
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return {**text, **tokens, "mlp_layer_types": ["dense"] * dense + ["sparse"] * sparse}


def _vision_config(width: Mapping[str, Any], patch_size: int) -> dict[str, Any]:
    sam, encoder = width["sam_vit_b"], width["qwen2-0-5b"]["dim"]
    return {
        "sam_config": {
            "hidden_size": sam["width"],
            "num_hidden_layers": sam["layers"],
            "num_attention_heads": sam["heads"],
            "global_attn_indexes": sam["global_attn_indexes"],
            "patch_size": patch_size,
            # config.json states 1024 for the second convolution, whose width is that of the next layers.
            "downsample_channels": [sam["downsample_channels"][0], encoder],
        },
        "encoder_config": {"hidden_size": encoder, **_ENCODER},
    }
