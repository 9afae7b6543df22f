"""Tests for MiniCPM-V 4.7 against transformers, on random weights."""

from typing import ClassVar

import pytest
from transformers import MiniCPMV4_7Config, MiniCPMV4_7ForConditionalGeneration, MiniCPMV4_7Processor

from mindie_mm.nn.splice import plain_ids
from tests.models.contract import clip, noise
from tests.models.test_minicpmv4_6 import WARNINGS, MiniCPMContract
from tests.models.test_minicpmv4_6 import Reference as MiniCPMV46Reference

pytestmark = WARNINGS


class Reference(MiniCPMV46Reference):
    model_class = MiniCPMV4_7ForConditionalGeneration
    processor_class = MiniCPMV4_7Processor


class TestMiniCPMV47(MiniCPMContract):
    name = "minicpmv4_7"
    reference_class = Reference
    config_class: ClassVar = MiniCPMV4_7Config
    config: ClassVar = {
        "insert_layer_id": 0,
        "image_start_id": "<image>",
        "image_end_id": "</image>",
        "slice_start_id": "<slice>",
        "slice_end_id": "</slice>",
        "newline_id": "Ċ",
    }

    @pytest.mark.parametrize(
        "items",
        [
            [{"video": clip(3, 40, 50)}],
            [{"video": clip(2, 90, 50)}, {"video": clip(1, 50, 90)}, {"text": "\n\n?"}],
            [{"image": noise(90, 50)}, {"text": "\n"}, {"image": noise(50, 90)}, {"text": "\n"}],
            [
                {"text": "a\n"},
                {"image": noise(200, 80)},
                {"text": "\n\nb"},
                {"video": clip(2, 60, 90)},
                {"text": "c"},
            ],
        ],
        ids=range(4),
    )
    def test_positions_equal_the_references(self, items, reference, model, tokenizer, path_file):
        expected = reference.inputs(items)
        ids = tokenizer.tokenize(items, path_file).numpy()
        media = model.read(ids)
        assert plain_ids(ids, media).tolist() == expected["input_ids"][0].tolist()
        sizes = {name: expected.get(name) for name in ("target_sizes", "target_sizes_videos", "mm_token_type_ids")}
        positions, offset = reference.model.model.get_rope_index(expected["input_ids"], **sizes)
        found = model.positions(len(ids), media)
        assert found.prompt.tolist() == positions[:, 0].tolist()
        assert found.delta == offset.item()
