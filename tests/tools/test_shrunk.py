"""Tests for small checkpoints that are made from published config.json files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mindie_mm.doctor.judgement import judge
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tests.published.checkpoints import FOLDER, TOKENS
from tools.shrunk import WIDTH, shrunk, write_shrunk

NAMES = sorted(file.parent.name for file in FOLDER.glob("*/config.json"))
QUICK = ("qwen3_vl_cosmos2", "llava15")
SLOW = {False: (), True: pytest.mark.slow}


def _answer(path: Path, kinds: tuple[str, ...], path_file: Path) -> list[int]:
    """Return the first two tokens of a greedy answer about an image, or about a clip if the family takes no images."""
    model = load_model(path, device="cpu", dtype="float32")
    media = (
        {"image": np.full((60, 90, 3), 128, np.uint8)} if "image" in kinds else {"audio": np.zeros(9000, np.float32)}
    )
    answer: list[int] = []
    with Tokenizer.from_pretrained(path) as tokenizer:
        try:
            ids = tokenizer.tokenize([media, {"text": "What?"}], path_file)
            for _ in range(2):
                if hasattr(model, "encode_prompt"):
                    logits = model.logits(ids, torch.tensor([2, *answer]))
                else:
                    logits = model.logits(torch.cat([ids, torch.tensor(answer, dtype=torch.int64)]))
                assert logits.isfinite().all()
                answer.append(int(logits[-1].argmax()))
        finally:
            release(path_file)
    return answer


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES],
)
def test_a_small_checkpoint_of_a_published_config_is_served(name, tmp_path):
    """A family that is not supported yet is refused when the checkpoint is made."""
    source = FOLDER / name
    (judged, *_) = judge(source, None, (64, 64))
    if judged.status == "error":
        with pytest.raises(UnsupportedCheckpoint):
            write_shrunk(source, tmp_path / "small")
        return
    write_shrunk(source, tmp_path / "small", tokens=TOKENS.get(name))
    family = family_of(Checkpoint.open(tmp_path / "small"))
    first, second = _answer(tmp_path / "small", family.kinds, tmp_path / "shm_name.txt")
    assert min(first, second) >= 0
    size = sum(file.stat().st_size for file in (tmp_path / "small").glob("*.safetensors"))
    assert size < 200e6, "most of it is the vocabulary"


def test_a_config_without_other_files_suffices(tmp_path):
    """Missing tokens and preprocessing settings are made up, except texts of a vocabulary."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copyfile(FOLDER / "llava15" / "config.json", source / "config.json")
    write_shrunk(source, tmp_path / "small")
    assert len(_answer(tmp_path / "small", ("image",), tmp_path / "shm_name.txt")) == 2


def test_only_sizes_change():
    config = json.loads((FOLDER / "qwen25_vl_7b" / "config.json").read_text())
    small = shrunk(config, config)
    assert small.keys() == config.keys()
    assert small["hidden_size"] == small["vision_config"]["out_hidden_size"] == WIDTH
    assert small["rope_scaling"] == {"type": "mrope", "mrope_section": [2, 3, 3]}
    assert small["vision_config"]["fullatt_block_indexes"] == [0, 1]
    kept = ("rope_theta", "vocab_size", "image_token_id", "rms_norm_eps", "max_position_embeddings", "model_type")
    assert {key: small[key] for key in kept} == {key: config[key] for key in kept}


@pytest.mark.slow
def test_types_of_layers_and_tokens_that_config_json_does_not_name_are_kept(tmp_path):
    """The type of each layer follows from other settings, and image_token_index is the id of <|patch|>."""
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": {"num_hidden_layers": 8, "model_type": "llama4_text"},
        "vision_config": {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096, "rope_theta": 10000},
    }
    (source := tmp_path / "source").mkdir()
    (source / "config.json").write_text(json.dumps(config))
    out = write_shrunk(source, tmp_path / "out")
    text = json.loads((out / "config.json").read_text())["text_config"]
    assert text["layer_types"] == ["chunked_attention"] * 3 + ["full_attention"]
    assert len(_answer(out, ("image",), tmp_path / "path")) == 2
