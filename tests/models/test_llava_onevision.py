"""Tests for LLaVA-OneVision against transformers, on random weights."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from mindie_mm.batch.output.collate import collate
from mindie_mm.decode.planning import plan_item
from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import Media, MediaOptions
from mindie_mm.settings.config import MediaCaps
from tests.media_samples import decode_all, encode_video, moving_frames
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, Unpacked, clip, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<image>", "<video>")
EDGES = (28, 56, 84, 112)
PINPOINTS = [[height, width] for height in EDGES for width in EDGES]
SIZE = {"size": {"height": 28, "width": 28}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.6]}
PIXELS = {**SIZE, "image_grid_pinpoints": PINPOINTS}
STATED = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_3"}


def write(out, pixels=PIXELS, **settings):
    tokenizer = save_tokenizer(out, SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ids = tokenizer.convert_tokens_to_ids
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=Qwen2Config(**TEXT),
        image_token_index=ids("<image>"),
        video_token_index=ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_3",
        **settings,
    )
    save_model(out, LlavaOnevisionForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=pixels, video_preprocessor_config=SIZE, processor_config=STATED)


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>", "video": "<video>"}
    model_class = LlavaOnevisionForConditionalGeneration
    processor_class = LlavaOnevisionProcessor
    parts = (LlavaOnevisionImageProcessor, AutoTokenizer, LlavaOnevisionVideoProcessor)

    def inputs(self, items):
        """Nest the images in a list, so that the processor assigns all of them to the same prompt."""
        images = [Image.fromarray(item["image"]) for item in items if "image" in item]
        videos = [item["video"] for item in items if "video" in item]
        given = {"images": [images] if images else None, "videos": videos or None}
        return self.processor(text=[self.text(items)], return_tensors="pt", **given)


class TestLlavaOnevision(ExtremeShapes, FamilyContract):
    name = "llava_onevision"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {
        **IMAGE_PROMPTS,
        "an image that is shrunk": [{"image": noise(112, 107)}, {"text": "What is it?"}],
        "a tall image": [{"image": noise(300, 7)}, {"text": "Where?"}],
        "a line, of which nothing is left on any canvas": [{"image": noise(1, 1100)}, {"text": "Where?"}],
        "a video": [{"video": clip(5, 50, 40)}, {"text": "Which way?"}],
        "mixed": [{"image": noise(61, 83)}, {"text": "then"}, {"video": clip(3, 28, 90)}, {"text": "then"}],
        "mixed, two images": [{"image": noise(9, 9)}, {"video": clip(1, 28, 28)}, {"image": noise(33, 40)}],
    }

    not_batched: ClassVar = ("mixed", "mixed, two images")

    def test_videos_with_different_numbers_of_frames_are_not_batched(self, model, tokenized):
        prompts = [Unpacked.of(model, tokenized[name]) for name in ("a video", "mixed")]
        with pytest.raises(InputError, match="a batch has videos of 3 and of 5 frames, but transformers' model takes"):
            collate(prompts, model.processor, 0, "right", None, 0)

    def test_only_plans_of_images_depend_on_the_number_of_items(self, processor):
        """A plan that does not depend on them may be kept for prompts with other numbers of items."""
        image, video = noise(40, 30), encode_video(moving_frames(3), fps=2)
        for kind, data, expected in (("image", image, True), ("video", video, False)):
            plan, _ = plan_item(processor, Media(kind, data), data, {"image": 1, "video": 1}, MediaCaps())
            assert plan.by_counts == expected, kind

    def test_features_may_come_from_several_layers(self, tmp_path, path_file):
        """The checkpoint uses features of two layers, another resize filter and no normalization."""
        write(tmp_path, {**PIXELS, "resample": 2, "do_normalize": False}, vision_feature_layer=[-1, 1])
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    @pytest.mark.parametrize("options", [{}, {"num_frames": 4}, {"fps": 3.0}], ids=str)
    def test_an_encoded_video_is_sampled_as_the_reference_does(self, options, processor, path, model):
        video = encode_video(moving_frames(9), fps=10)
        plan, write = processor.plan(Media("video", video, options=MediaOptions(**options)), video, {"video": 1})
        frames = decode_all(video)
        indices = default_sample_indices_fn(VideoMetadata(total_num_frames=9, fps=10.0), **options)
        expected = LlavaOnevisionVideoProcessor.from_pretrained(path)([frames[indices]], return_tensors="pt")
        found = {"pixel_values_videos": np.empty(plan.specs["pixel_values_videos"].shape, np.uint8)}
        write(found)
        pixels = model.processor.normalizations["video"](torch.from_numpy(found["pixel_values_videos"]))
        assert torch.equal(pixels, expected["pixel_values_videos"][0])

    @pytest.mark.parametrize(
        ("frames", "options", "error", "named"),
        [
            (1500, {}, LimitExceeded, "1500 frames .* limit is 1023"),
            (3, {"num_frames": 4}, InputError, "num_frames is 4; .* 3 frames"),
            (3, {"fps": 2.0}, InputError, "frames have no rate"),
        ],
        ids=str,
    )
    def test_frames_that_cannot_be_taken_are_refused(self, frames, options, error, named, processor):
        video = np.zeros((frames, 4, 4, 3), np.uint8)
        with pytest.raises(error, match=named):
            processor.plan(Media("video", video, options=MediaOptions(**options)), video, {"video": 1})

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio is 'anyres'"),
            ("processor_config", {"num_image_tokens": 17}, "num_image_tokens is 17"),
            ("processor_config", {"vision_aspect_ratio": "anyres_max_9"}, "is 'anyres_max_9'"),
            ("video_preprocessor_config", {"size": {"shortest_edge": 28}}, "resized to several"),
            ("video_preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("video_preprocessor_config", {"video_processor_type": "Other"}, "video_processor_type is 'Other'"),
        ]
    )
