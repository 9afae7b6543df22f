"""Tests for LLaVA v1, whose family replaces one part of a transformers class."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    LlavaProcessor,
)

from mindie_mm.models import load_model
from tests.models.contract import IMAGE_PROMPTS, FamilyContract
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

HERE = Path(__file__).parent
PIXELS = {
    "image_processor_type": "LlavaImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}
STATED = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


class LinearLlava(LlavaForConditionalGeneration):
    """The reference."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        self.model.multi_modal_projector = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size)


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = LinearLlava
    processor_class = LlavaProcessor
    parts = (LlavaImageProcessor, AutoTokenizer)


def write_checkpoint(out: Path) -> None:
    tokenizer = save_tokenizer(
        out, ("<s>", "<pad>", "</s>", "<image>"), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    ids = tokenizer.convert_tokens_to_ids
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT), image_token_index=ids("<image>")
    )
    save_model(out, LinearLlava, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=PIXELS, processor_config=STATED)
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(written | {"model_type": "llava_v1"}))


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


@pytest.fixture(scope="module", autouse=True)
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the module importable, with the entry point that its installation would have."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(HERE / "mindie_mm_llava_v1.py", folder)
    (info := folder / "mindie_mm_llava_v1-0.1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mindie_mm_llava_v1\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[mindie_mm.models]\nllava_v1 = mindie_mm_llava_v1:LlavaV1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop("mindie_mm_llava_v1", None)


@pytest.mark.slow
class TestLlavaV1(FamilyContract):
    name = "llava_v1"
    write_checkpoint = staticmethod(write_checkpoint)
    reference_class = Reference
    prompts: ClassVar = IMAGE_PROMPTS


def test_the_features_are_those_of_the_reference(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    module = load_model(tmp_path, device="cpu").module
    pixels = torch.rand(1, 3, 28, 28)
    with torch.inference_mode():
        expected = LinearLlava.from_pretrained(tmp_path).get_image_features(pixels).pooler_output[0]
        assert isinstance(module.model.multi_modal_projector, nn.Linear)
        torch.testing.assert_close(module.get_image_features(pixels).pooler_output[0], expected)
