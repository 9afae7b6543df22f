"""Small checkpoints made from the published configuration files in this folder.

All keys except dimensions stay as published. Weights have the published names, and special tokens the published ids.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tools.shrunk import write_tokenizer

FOLDER = Path(__file__).parent
_ROUGH_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NOT_COPIED = {"SOURCE", "weight_names.json"}

_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_TOWER, "num_key_value_heads": 1}
_QWEN_ROPE = {"mrope_section": [2, 3, 3]}
_QWEN2 = {**_TEXT, "rope_scaling": _QWEN_ROPE, "max_window_layers": 2}
_QWEN2_TOWER = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
_QWEN25_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
}
_QWEN3 = {
    "text_config": {**_TEXT, "head_dim": 16, "rope_scaling": {"mrope_section": [2, 3, 3]}},
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0, 1],
    },
}
_LLAVA = {"text_config": _TEXT, "vision_config": {**_TOWER, "num_hidden_layers": 3}}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "fuyu_8b": {"text_config": {**_TOWER, "intermediate_size": 64}},
    "gemma3_medgemma27b": {
        "text_config": {**_TEXT, "num_hidden_layers": 7, "head_dim": 16},
        "vision_config": {**_TOWER, "num_hidden_layers": 1},
    },
    "idefics3_aeon_smolvlm256": {"text_config": {**_TEXT, "head_dim": 16}, "vision_config": _TOWER},
    "idefics3_granite_docling": {"text_config": {**_TEXT, "head_dim": 16}, "vision_config": _TOWER},
    "llava15": _LLAVA,
    "llava15_lora": _LLAVA,
    "llava_next": _LLAVA,
    "qwen25_vl_3b_agri": {**_QWEN2, "vision_config": _QWEN25_TOWER},
    "qwen25_vl_7b": {**_QWEN2, "vision_config": _QWEN25_TOWER},
    "qwen2_vl_ain": {**_QWEN2, "vision_config": _QWEN2_TOWER},
    "qwen2_vl_olmocr": {**_QWEN2, "vision_config": _QWEN2_TOWER},
    "qwen3_vl_8b_lora": _QWEN3,
    "qwen3_vl_cosmos2": _QWEN3,
}
"""Dimensions of the small models, by checkpoint. These checkpoints are supported."""
BASES: Mapping[str, str] = {"llava15_lora": "llava15", "qwen3_vl_8b_lora": "qwen3_vl_cosmos2"}
"""Checkpoints whose config.json is used for a folder that contains only an adapter and processor files."""
REFUSED: Mapping[str, str] = {
    "internvl_chat_2b": r"no tokenizer\.json, which .* InternLM2Tokenizer requires.*OpenGVLab/InternVL3-1B-hf",
    "llava15_lora": r"no config\.json.*adapter.*merge",
    "llava_next_video": r"'llava_next_video' \(LlavaNextVideoFor.*no family supports.*llava_next, .* such as llava-hf/",
    "qwen3_vl_8b_lora": r"no config\.json.*adapter.*merge",
    "unlimited_ocr": r"'unlimited-ocr' \(UnlimitedOCRForCausalLM\).*no family supports.*docs/families\.md",
    "videollama3_cogstream": r"'videollama3_qwen2' \(Videollama3Qwen2For.*no family supports.*docs/families\.md",
}
"""Expected error for each published folder that is refused. To support a folder, move it to SIZES."""
ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("florence2_04rr", "florence2_amd", "florence2_large_ft", "florence2_oracle"), "florence2"),
    "deepseek_ocr2": "deepseek_ocr2",
    "molmo_nf4": "molmo",
    "qwen3_vl_embedding": "its small model, without a head, is tested below",
    "qwen_vl_int4": "qwen_vl",
}
"""Checkpoints whose layouts are tested in the tests for their families."""
ONLY_CONFIGS = frozenset(
    {
        "aria",
        "ernie45_vl_28b",
        "gemma3n_e2b",
        "gemma4_26b_a4b",
        "gemma4_e2b",
        "glm41v_9b_thinking",
        "glm46v",
        "glm46v_flash",
        "glm_ocr",
        "hunyuan_ocr_1_5",
        "kimi_k2_5",
        "lfm2_vl_3b",
        "llama4_scout",
        "minicpmv4_6",
        "mistral_small_3",
        "ovis2_2b",
        "ovis2_2b_original",
        "paddleocr_vl",
        "phi4_multimodal",
        "pixtral_12b",
        "qwen3_5_0_8b",
        "qwen3_5_moe_35b",
        "qwen3_asr",
        "qwen3_omni_30b",
        "qwen3_vl_30b_a3b",
        "step3p7_flash",
        "whisper_base",
    }
)
"""Folders with a config.json, but without a tokenizer's files.

`mindie-mm doctor` either judges each of these configurations as served, or refuses it by name
(tests/cli/test_judgement.py), so that a new family needs no change here. Small checkpoints are made from the served
configurations (tests/tools/test_shrunk.py).
"""
TOKENS: Mapping[str, Mapping[str, int]] = {
    "fuyu_8b": {"<s>": 1, "<0x04>": 71122, "|SPEAKER|": 71011, "|NEWLINE|": 71019},
    "gemma3_medgemma27b": {
        "<pad>": 0,
        "<eos>": 1,
        "<bos>": 2,
        "<unk>": 3,
        "<start_of_turn>": 105,
        "<end_of_turn>": 106,
        "<start_of_image>": 255999,
        "<end_of_image>": 256000,
    },
    "deepseek_ocr2": {"<image>": 128815},
    "lfm2_vl_3b": {
        "<|pad|>": 0,
        "<|startoftext|>": 1,
        "<|im_end|>": 7,
        "<image>": 396,
        "<|image_start|>": 498,
        "<|image_end|>": 499,
        "<|img_thumbnail|>": 497,
    },
    "llava15": {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001},
    "ovis2_2b_original": {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<IMG_ATOM>": 151665,
        "<IMG_START>": 151666,
        "<IMG_GRID>": 151667,
        "<IMG_COL>": 151668,
        "<IMG_ROW>": 151669,
        "<IMG_END>": 151670,
    },
    "whisper_base": {
        "<|endoftext|>": 50257,
        "<|startoftranscript|>": 50258,
        "<|startofprev|>": 50361,
        "<|nocaptions|>": 50362,
        "<|notimestamps|>": 50363,
    },
}
"""Special tokens whose ids are only in vocabularies, which are not part of this folder."""
# These weights of LLaVA-NeXT are the quantized base of an adapter, so the small model uses transformers' names.
_PLAIN_NAMES = frozenset({"llava_next"})
# Replacements that convert the names with which transformers saves weights to the published names.
_PUBLISHED_NAMES = {
    "fuyu": ((r"^model\.language_model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head"),
             (r"^model\.vision_embed", "vision_embed")),
    "gemma3": ((r"^model\.language_model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head"),
               (r"^model\.vision_tower\.(?!vision_model)", "vision_tower.vision_model."),
               (r"^model\.vision_tower\.", "vision_tower."),
               (r"^model\.multi", "multi")),
    "qwen2_vl": ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")),
    "qwen2_5_vl": ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")),
}  # fmt: skip


def write_small(name: str, out: Path) -> None:
    """Write a small checkpoint into the empty directory `out`, from the published files of `name`."""
    if base := BASES.get(name):
        shutil.copyfile(FOLDER / base / "config.json", out / "config.json")
    for file in (FOLDER / name).iterdir():
        if file.name not in _NOT_COPIED:
            shutil.copyfile(file, out / file.name)
    config = json.loads((out / "config.json").read_text())
    config = _merged(config, SIZES[name])
    if layers := config.get("text_config", {}).get("layer_types"):
        config["text_config"]["layer_types"] = layers[: config["text_config"]["num_hidden_layers"]]
    (out / "config.json").write_text(json.dumps(config))
    special = special_tokens(name)
    # Fuyu's special tokens are pieces of the vocabulary instead of added tokens.
    spelled = tuple(token for token in TOKENS[name] if not token.startswith("<0x")) if name == "fuyu_8b" else ()
    write_tokenizer(out, special, spelled)
    _write_weights(name, config, out)


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `changes`, which may change single keys of a section."""
    nested = {key: _merged(config.get(key) or {}, value) for key, value in changes.items() if isinstance(value, dict)}
    return {**config, **changes, **nested}


def special_tokens(name: str) -> dict[str, int]:
    """Return the published special tokens with their ids."""
    folder = FOLDER / BASES.get(name, name)
    tokens = dict(TOKENS.get(folder.name, {}))
    if (file := folder / "tokenizer_config.json").is_file():
        decoder = json.loads(file.read_text()).get("added_tokens_decoder", {})
        tokens |= {entry["content"]: int(index) for index, entry in decoder.items()}
    if (file := folder / "added_tokens.json").is_file():
        tokens |= json.loads(file.read_text())
    return tokens


def _write_weights(name: str, config: Mapping[str, Any], out: Path) -> None:
    """Write random weights with the published names, in two files."""
    cls = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    model = cls(cls.config_class.from_pretrained(out)).float()
    tied = model.all_tied_weights_keys if hasattr(model, "all_tied_weights_keys") else {}
    renames = _PUBLISHED_NAMES.get(config["model_type"], ())
    weights = {
        reduce(lambda key, rename: re.sub(*rename, key), renames, key): value.clone()
        for key, value in model.state_dict().items()
        if key not in tied
    }
    file = FOLDER / name / "weight_names.json"
    if file.is_file() and name not in _PLAIN_NAMES:
        published = {*json.loads(file.read_text())}
        found = {_ROUGH_NUMBER.sub("N", key) for key in weights}
        assert found == published, (sorted(found - published), sorted(published - found))
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in halves.items():
        save_file({key: weights[key].contiguous() for key in held}, out / shard, {"format": "pt"})
    where = {key: shard for shard, held in halves.items() for key in held}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
