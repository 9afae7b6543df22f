"""Tests for MiniCPM-V 4.6 against transformers, on random weights."""

from typing import ClassVar

import pytest
import torch
from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
)

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from mindie_mm.nn.splice import plain_ids
from tests.models.contract import FamilyContract, clip, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.models.test_qwen3_5 import TEXT
from tests.transformers_reference import AutoTokenizer

# The reference's processor passes torch tensors to numpy.cumsum.
WARNINGS = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
pytestmark = WARNINGS

EXTRA_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *EXTRA_TOKENS.values())
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>{% elif part['type'] == 'video' %}<|video_pad|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 4,
    "initializer_range": 0.1,
}
PIXELS = {"patch_size": 4, "scale_resolution": 48, "max_slice_nums": 4}


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    model_class = MiniCPMV4_6ForConditionalGeneration
    processor_class = MiniCPMV4_6Processor
    parts = (MiniCPMV4_6ImageProcessor, MiniCPMV4_6VideoProcessor, AutoTokenizer)


def in_blocks(pixels, sizes, group):
    """Return the reference's pixels [1, 3, patch, n * patch] as patches [n, 3 * patch * patch] in our order."""
    patch = pixels.shape[2]
    rows = pixels[0].reshape(3, patch, -1, patch).permute(2, 0, 1, 3).flatten(1)
    parts = []
    for (height, width), part in zip(sizes, rows.split([height * width for height, width in sizes]), strict=True):
        parts.append(part.view(height // group, group, width // group, group, -1).transpose(1, 2).flatten(0, 3))
    return torch.cat(parts)


class MiniCPMContract(FamilyContract):
    """Tests that every MiniCPM-V family must pass."""

    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(40, 60)}, {"text": "What is it?"}],
        "two images": [{"image": noise(90, 110)}, {"text": " and "}, {"image": noise(70, 30)}, {"text": "?"}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "a video": [{"video": clip(3, 40, 50)}, {"text": "Which way?"}],
        "mixed": [
            {"image": noise(100, 40)},
            {"text": "\n"},
            {"video": clip(2, 100, 60)},
            {"image": noise(9, 9)},
            {"text": "\nthen"},
        ],
    }
    ignored_options = ("num_frames", "fps")
    config_class: ClassVar = MiniCPMV4_6Config
    downsample_mode: ClassVar = "16x"
    numbers_images: ClassVar = True
    config: ClassVar = {"insert_layer_id": 0}

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out,
            SPECIAL_TOKENS,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            chat_template=CHAT_TEMPLATE,
            extra_special_tokens=EXTRA_TOKENS,
        )
        ids = tokenizer.convert_tokens_to_ids
        own = {name: ids(token) if isinstance(token, str) else token for name, token in cls.config.items()}
        config = cls.config_class(
            text_config={**TEXT, "model_type": "qwen3_5_text", "initializer_range": 0.05},
            vision_config=VISION,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            downsample_mode=cls.downsample_mode,
            tie_word_embeddings=True,
            **own,
        )
        save_model(out, cls.reference_class.model_class, config, ids("<|im_end|>"), ids("<|endoftext|>"))
        pixels = {**PIXELS, "downsample_mode": cls.downsample_mode, "use_image_id": cls.numbers_images}
        save_json(
            out,
            preprocessor_config={**pixels, "image_processor_type": "MiniCPMV4_6ImageProcessor"},
            video_preprocessor_config={
                **pixels,
                "max_slice_nums": 2,
                "max_num_frames": 20,
                "video_processor_type": "MiniCPMV4_6VideoProcessor",
            },
        )


class MoreTokens(MiniCPMContract):
    """A checkpoint whose tower does not merge patches within windows, and whose images are not numbered."""

    reference_class = Reference
    downsample_mode = "4x"
    numbers_images = False


class TestMiniCPMV46(MiniCPMContract):
    name = "minicpmv4_6"
    reference_class = Reference

    def test_images_of_any_size_have_the_references_ids(self, reference, model, tokenizer, path_file):
        for height, width in ((48, 48), (47, 50), (96, 96), (97, 95), (300, 50), (50, 300), (5, 700), (400, 401)):
            items = [{"image": noise(height, width)}, {"text": "?"}]
            expected = reference.inputs(items)
            ids = tokenizer.tokenize(items, path_file).numpy()
            media = model.read(ids)
            assert plain_ids(ids, media).tolist() == expected["input_ids"][0].tolist(), (height, width)
            self.assert_arrays(expected, media, model)

    def test_very_narrow_images_are_refused(self, processor):
        image = noise(1, 201)
        with pytest.raises(LimitExceeded, match="201x1"):
            processor.plan(Media("image", image), image, {})

    def test_images_may_be_unnumbered_and_have_four_times_as_many_features(self, tmp_path, path_file):
        MoreTokens.write_checkpoint(tmp_path)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    test_a_changed_setting_is_refused = refusals(
        [
            ("preprocessor_config", {"downsample_mode": "4x"}, "downsample_mode is '4x'"),
            ("video_preprocessor_config", {"stack_frames": 3}, "stack_frames is 3"),
            ("preprocessor_config", {"patch_size": 7}, "patch_size is 7, but the tower"),
            ("config", {"image_token_id": 5}, "image_token_id is 5, but the tokenizer's id"),
        ]
    )
