"""Checkpoints of Kimi K2.5 in the layout of moonshotai, whose configuration and tokenizer classes are remote code.

transformers knows the published names of the weights. The keys of config.json and the control tokens are taken from
configuration_kimi_k25.py, kimi_k25_processor.py and tokenization_kimi.py of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models._tiktoken import bpe_tokenizer, read_ranks
from mindie_mm.nn.checkpoint.config_keys import HOUSEKEEPING, Keys
from mindie_mm.nn.checkpoint.directory import Checkpoint

MODEL_TYPE = "kimi_k25"
IMAGES, VIDEOS = "Kimi_K25ImageProcessor", "Kimi_K25VideoProcessor"
_SETTINGS = "media_proc_cfg"
"""Section of preprocessor_config.json with the settings for images and videos."""
_VOCABULARY = "tiktoken.model"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = (
    rf"[\p{{Han}}]+|{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUM_RESERVED = 256
"""Number of ids after the vocabulary that are special tokens, with names of their own or without."""
_SIZES: Mapping[str, str] = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "merge_kernel_size": "merge_kernel_size",
    "patch_size": "patch_size",
}
"""Names in transformers of the keys of vision_config."""
_VISION = Keys(
    read={
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "merge_kernel_size": (2, 2),
        "patch_size": 14,
        "projector_ln_eps": 1e-5,
    },
    only={
        "merge_type": ("sd2_tpool",),
        "mm_projector_type": ("patchmerger",),
        "pos_emb_type": ("divided_fixed",),
        "projector_hidden_act": ("gelu",),
        "video_attn_type": ("spatial_temporal",),
    },
)
_TEXT = Keys(only={"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
_TOP = Keys(
    read={"media_placeholder_token_id": 163605},
    only={"use_unified_vision_chunk": (True,), "video_placeholder": ("<|kimi_k25_video_placeholder|>",)},
    sections={"vision_config": _VISION, "text_config": _TEXT},
)
_MEDIA = Keys(
    read={
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096,
        "sample_fps": 2.0,
        "temporal_merge_kernel_size": 4,
    },
    only={
        "fixed_output_tokens": (),
        "in_patch_limit_video": (),
        "max_num_frames_each_video": (),
        "timestamp_mode": ("hh:mm:ss.fff",),
    },
)


def translate(checkpoint: Checkpoint) -> Checkpoint:
    """Translate a checkpoint from moonshotai's layout into transformers' layout. Return others unchanged.

    Raise UnsupportedCheckpoint for settings that transformers' layout cannot express.
    """
    vision = checkpoint.config.get("vision_config")
    if checkpoint.renamings is not None or not isinstance(vision, Mapping) or "vt_hidden_size" not in vision:
        return checkpoint
    config = _TOP.complete(checkpoint.config, f"{checkpoint.path}/config.json")
    own, text = config["vision_config"], config["text_config"]
    translation = {
        **{key: config[key] for key in HOUSEKEEPING & config.keys()},
        "model_type": MODEL_TYPE,
        "text_config": {key: value for key, value in text.items() if key not in _TEXT.only},
        "vision_config": {name: own[key] for key, name in _SIZES.items()},
        "projection_hidden_size": own.get("mm_hidden_size", own["vt_hidden_size"]),
        "projection_layer_norm_eps": own["projector_ln_eps"],
        "image_token_id": config["media_placeholder_token_id"],
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }
    files = _preprocessing(checkpoint)
    if not checkpoint.has("tokenizer.json"):
        files["tokenizer.json"] = {
            "added_tokens": [{"id": index, **token} for index, token in _named(checkpoint).items()]
        }
    return checkpoint.translated(translation, files, ())


def _named(checkpoint: Checkpoint) -> dict[int, dict[str, Any]]:
    """Return the special tokens with names of their own, by id."""
    stated = checkpoint.json("tokenizer_config.json").get("added_tokens_decoder", {})
    return {int(index): token for index, token in stated.items()}


def _preprocessing(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    stated = checkpoint.json("preprocessor_config.json").get(_SETTINGS)
    if stated is None:  # missing, or already in transformers' layout
        return {}
    settings = _MEDIA.complete(stated, f"{checkpoint.path}/preprocessor_config.json", f"{_SETTINGS}.")
    side = settings["patch_limit_on_one_side"]
    shared = {
        "size": {"max_height": side, "max_width": side},
        "patch_size": settings["patch_size"],
        "merge_size": settings["merge_kernel_size"],
        "image_mean": settings["image_mean"],
        "image_std": settings["image_std"],
    }
    videos = {
        "max_patches": settings["in_patch_limit_each_frame"],
        "temporal_patch_size": settings["temporal_merge_kernel_size"],
        "fps": settings["sample_fps"],
    }
    return {
        "preprocessor_config.json": {
            **shared,
            "max_patches": settings["in_patch_limit"],
            "image_processor_type": IMAGES,
        },
        "video_preprocessor_config.json": {**shared, **videos, "video_processor_type": VIDEOS},
    }


def original_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the tokenizer of tiktoken.model as a transformers fast tokenizer.

    transformers would convert the file with a pattern that splits other texts, such as Chinese.

    Raise UnsupportedCheckpoint if a file is missing or unreadable.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    if not (file := checkpoint.path / _VOCABULARY).is_file():
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has neither {_VOCABULARY} nor tokenizer.json; copy {_VOCABULARY} from the original "
            "repository, such as moonshotai/Kimi-K2.5"
        )
    eos = checkpoint.require_special_token("eos_token")
    settings = checkpoint.json("tokenizer_config.json")
    ranks = read_ranks(file)
    named = _named(checkpoint)
    tokenizer = bpe_tokenizer(ranks, _PATTERN)
    for index in range(len(ranks), max([len(ranks) + _NUM_RESERVED - 1, *named]) + 1):
        token = named.get(index, {"content": f"<|reserved_token_{index}|>", "special": True})
        added = AddedToken(token["content"], special=token.get("special", True), normalized=False)
        tokenizer.add_tokens([added])
    template = checkpoint.path / "chat_template.jinja"
    names = ("bos_token", "unk_token", "pad_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        model_max_length=settings.get("model_max_length", 262144),
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template"),
        **{name: text for name in names if (text := checkpoint.special_token(name)) is not None},
    )
