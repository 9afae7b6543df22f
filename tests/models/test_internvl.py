"""Tests for InternVL against transformers, on random weights."""

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    Qwen2Config,
)
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Media, MediaOptions
from mindie_mm.media.image.tiles import closest_grid
from mindie_mm.models import load_model
from mindie_mm.nn.splice import plain_ids
from mindie_mm.tokenize import Tokenizer
from tests.media_samples import decode_all, encode_video, moving_frames
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, clip, noise, refusals
from tests.models.mindie_contract import MindIEContract
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer, without_token
from tests.transformers_reference import AutoTokenizer

TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
SPECIAL = ("<s>", "<pad>", "</s>", *TOKENS.values())
SIZE = {"size": {"height": 28, "width": 28}}
PIXELS = {**SIZE, "image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False, "max_patches": 6}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\\n' }}{% elif part['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def write(out, pixels=PIXELS, frames=SIZE, vision=(), **settings):
    tokenizer = save_tokenizer(
        out,
        SPECIAL,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=TOKENS,
        chat_template=TEMPLATE,
    )
    ids = tokenizer.convert_tokens_to_ids
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**{**VISION, **dict(vision)}),
        text_config=Qwen2Config(**TEXT),
        image_token_id=ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        **settings,
    )
    save_model(out, InternVLForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(
        out, preprocessor_config=pixels, video_preprocessor_config=frames, processor_config={"image_seq_length": 4}
    )


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<IMG_CONTEXT>", "video": "<video>"}
    model_class = InternVLForConditionalGeneration
    processor_class = InternVLProcessor
    parts = (GotOcr2ImageProcessor, AutoTokenizer, InternVLVideoProcessor)


class TestInternVL(MindIEContract, ExtremeShapes, FamilyContract):
    name = "internvl"
    mindie_layout = "internvl"
    mindie_prompts = (
        [{"image": noise(20, 29)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        [{"image": noise(61, 83)}, {"text": "then"}, {"video": clip(3, 28, 90)}, {"image": noise(8, 8)}],
    )
    mindie_start = "<img>"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {
        **IMAGE_PROMPTS,
        "a video": [{"video": clip(5, 50, 40)}, {"text": "Which way?"}],
        "mixed": [{"image": noise(61, 83)}, {"text": "then"}, {"video": clip(3, 28, 90)}, {"image": noise(8, 8)}],
    }

    def mindie_arrays(self, prompt, items, model, ids):
        planes = [(item.shape.kind, item.view["pixel_values"].transpose(0, 3, 1, 2)) for item in items]
        return [
            part for kind, tiles in planes for part in ([tiles] if kind == "image" else np.split(tiles, len(tiles)))
        ]

    def test_grids_equal_the_references(self):
        for height in range(1, 200, 7):
            for width in range(1, 200, 5):
                for bounds in ((1, 6), (2, 12), (1, 1)):
                    rows, columns = closest_grid(height, width, 28, *bounds)
                    assert (columns, rows) == get_optimal_tiled_canvas((height, width), (28, 28), *bounds)

    def test_dynamic_frequencies_equal_the_defaults_within_the_models_context(self, path, tmp_path):
        """InternVL3's published config.json sets dynamic frequencies.

        They have no effect, because the context never exceeds the trained length.
        """
        other = shutil.copytree(path, tmp_path / "dynamic")
        config = json.loads((other / "config.json").read_text())
        del config["text_config"]["rope_parameters"]
        config["text_config"] |= {"rope_theta": 1e4, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic"}}
        (other / "config.json").write_text(json.dumps(config))
        theirs = InternVLForConditionalGeneration.from_pretrained(other, dtype=torch.float32).eval()
        assert theirs.model.language_model.rotary_emb.rope_type == "dynamic"
        ids = torch.arange(4096) % 300 + 10
        with torch.inference_mode():
            expected = theirs(input_ids=ids.unsqueeze(0)).logits[0]
        assert (load_model(other, device="cpu").logits(ids) - expected).abs().max() <= 1e-4

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
            ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "alpha": 9.0}}, "dynamic"),
        ],
    )
    def test_text_models_with_unsupported_attention_are_refused(self, settings, named, path, tmp_path):
        other = shutil.copytree(path, tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        config["text_config"] |= settings
        (other / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedCheckpoint, match=named):
            load_model(other, device="cpu")

    def test_a_marker_need_not_be_a_token(self, path, reference, model, tmp_path, path_file):
        other = without_token(path, tmp_path / "other", "<video>")
        with Tokenizer.from_pretrained(other) as tokenizer:
            for name, items in self.prompts.items():
                ids = tokenizer.tokenize(items, path_file).numpy()
                expected = reference.inputs(items)["input_ids"][0].tolist()
                assert plain_ids(ids, model.read(ids)).tolist() == expected, name

    @pytest.mark.parametrize(
        ("settings", "vision", "pixels", "frames"),
        [
            ({"vision_feature_layer": 1}, {"use_qk_norm": True}, {"min_patches": 3}, {"resample": 2}),
            (
                {},
                {"use_mean_pooling": False, "norm_type": "rms_norm"},
                {"resample": 1},
                {"image_mean": [0.1, 0.2, 0.3]},
            ),
            ({}, {"use_absolute_position_embeddings": False}, {"do_normalize": False}, {"do_normalize": False}),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(
        self, settings, vision, pixels, frames, tmp_path, path_file
    ):
        write(tmp_path, {**PIXELS, **pixels}, {**SIZE, **frames}, vision, **settings)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_chat_ids_equal_the_references(self, tokenizer, reference, model, path_file):
        image, video = noise(40, 90), clip(2, 28, 28)
        content = [
            {"type": "image", "image": image},
            {"type": "video", "video": video},
            {"type": "text", "text": "Hm?"},
        ]
        ids = tokenizer.tokenize_chat([{"role": "user", "content": content}], path_file).numpy()
        expected = reference.inputs([{"image": image}, {"text": "\n"}, {"video": video}, {"text": "\nHm?"}])
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    @pytest.mark.parametrize("options", [{}, {"num_frames": 4}, {"fps": 3.0}], ids=str)
    def test_an_encoded_video_is_sampled_as_the_reference_does(self, options, processor, path, model):
        video = encode_video(moving_frames(9), fps=10)
        plan, write = processor.plan(Media("video", video, options=MediaOptions(**options)), video, {"video": 1})
        metadata = {"total_num_frames": 9, "fps": 10.0}
        expected = InternVLVideoProcessor.from_pretrained(path)(
            [decode_all(video)],
            video_metadata=[metadata],
            do_sample_frames=bool(options),
            return_tensors="pt",
            **options,
        )
        found = {"pixel_values": np.empty(plan.specs["pixel_values"].shape, np.uint8)}
        write(found)
        pixels = model.processor.normalizations["video"](torch.from_numpy(found["pixel_values"]))
        assert torch.equal(pixels, expected["pixel_values_videos"][0])

    def test_too_many_frames_are_refused(self, processor):
        video = np.zeros((700, 4, 4, 3), np.uint8)
        with pytest.raises(LimitExceeded, match=r"700 frames .* limit is 682"):
            processor.plan(Media("video", video), video, {"video": 1})

    def test_embeddings_whose_grid_does_not_fit_are_refused(self, processor):
        assert processor.spelling("video", 8, (3,)) is None

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
            ("config", {"vision_feature_layer": [1, 2]}, r"vision_feature_layer is \[1, 2\]"),
            ("config", {"downsample_ratio": 0.3}, "downsample_ratio is 0.3"),
            ("config", {"image_token_id": 2}, "image_token_id is 2"),
            ("config", {"vision_config": {**VISION, "image_size": [28, 56]}}, "image_size is 28; only 56"),
            ("config", {"vision_config": {"model_type": "clip_vision_model"}}, "clip_vision_model"),
            ("processor_config", {"image_seq_length": 16}, "image_seq_length is 16"),
            ("preprocessor_config", {"size": {"height": 56, "width": 56}}, r"images are resized to \(56, 56\)"),
            ("video_preprocessor_config", {"size": {"shortest_edge": 28}}, "several sizes"),
            ("tokenizer_config", {"extra_special_tokens": {}, "video_token": None}, "no video_token"),
        ]
    )
