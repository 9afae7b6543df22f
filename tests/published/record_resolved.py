"""Print how the installed release of transformers reads the published config.json files, for resolved.json.

Run once with each release of transformers 4: `python record_resolved.py tests/published`. The printed entry contains
the keys that determine the text model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING

KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps"),
    *("max_position_embeddings", "attention_bias", "qk_layernorm", "query_pre_attn_scalar", "layer_types"),
    *("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "final_logit_softcapping"),
)


def resolved(folder: Path) -> dict | None:
    """Return the settings that the release reads from the folder's config.json, or None if it cannot read the file."""
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    try:
        config = CONFIG_MAPPING[model_type].from_pretrained(folder)
    except Exception:  # noqa: BLE001 - each release fails differently
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)
    found = text.to_dict()
    if layers := found.get("layer_types"):
        found["layer_types"] = "".join(layer[0] for layer in layers)
    return {key: found[key] for key in KEYS if key in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folders = sorted(file.parent for file in parser.parse_args().folder.glob("*/config.json"))
    entries = {folder.name: resolved(folder) for folder in folders}
    entries = {name: entry for name, entry in entries.items() if entry is not None}
    lines = ",\n".join(f'"{name}": {json.dumps(entry, sort_keys=True)}' for name, entry in entries.items())
    print(f'"{transformers.__version__}": {{\n{lines}\n}}')


if __name__ == "__main__":
    main()
