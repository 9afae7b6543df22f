"""Tests for SmolVLM against transformers, on random weights."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from num2words import num2words
from PIL import Image
from transformers import (
    LlamaConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import Media, MediaOptions
from mindie_mm.models.smolvlm import in_words
from mindie_mm.nn.splice import plain_ids
from tests.media_samples import decode_all, encode_video, moving_frames
from tests.models.contract import ExtremeShapes, FamilyContract, clip, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import TEXT, VISION, save_json, save_model, save_tokenizer
from tests.models.test_idefics3 import FEATURES, PIXELS, PROMPTS, SPECIAL
from tests.transformers_reference import AutoTokenizer

# The Hub's template does not support videos, and the tokenizer has no token for them.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
FRAMES = {
    "max_image_size": {"longest_edge": 28},
    "video_sampling": {"video_size": {"longest_edge": 56}, "max_frames": 5, "fps": 2},
    "image_mean": [0.4, 0.5, 0.6],
}


def write(out):
    tokens = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    tokenizer = save_tokenizer(
        out,
        (*SPECIAL, "<|im_start|>"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={**tokens, "global_image_token": "<global-img>"},
    )
    ids = tokenizer.convert_tokens_to_ids
    config = SmolVLMConfig(vision_config=VISION, text_config=LlamaConfig(**TEXT), image_token_id=ids("<image>"))
    save_model(out, SmolVLMForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
    save_json(
        out,
        preprocessor_config=PIXELS,
        video_preprocessor_config=FRAMES,
        processor_config={"image_seq_len": FEATURES},
        chat_template={"chat_template": TEMPLATE},
    )


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>", "video": "<video>"}
    model_class = SmolVLMForConditionalGeneration
    processor_class = SmolVLMProcessor
    parts = (SmolVLMImageProcessor, AutoTokenizer, SmolVLMVideoProcessor)
    settings: ClassVar = {"chat_template": TEMPLATE}

    def inputs(self, items):
        """Concatenate the pixels of images and videos, because the processor returns only the pixels of the videos."""
        inputs = super().inputs(items)
        pixels = [self.pixels(item) for item in items if "text" not in item]
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels, dim=1)
            inputs["pixel_attention_mask"] = torch.ones_like(inputs["pixel_values"][:, :, 0], dtype=torch.int64)
        return inputs

    def pixels(self, item):
        if "image" in item:
            image = Image.fromarray(item["image"])
            return self.processor.image_processor(image, return_tensors="pt")["pixel_values"]
        return self.processor.video_processor([item["video"]], return_tensors="pt")["pixel_values"]


class TestSmolVLM(ExtremeShapes, FamilyContract):
    name = "smolvlm"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {
        **PROMPTS,
        "a video": [{"video": clip(5, 50, 40)}, {"text": "Which way?"}],
        "mixed": [{"image": noise(61, 83)}, {"text": "then"}, {"video": clip(3, 28, 90)}, {"image": noise(8, 8)}],
    }

    def test_numbers_are_spelled_as_num2words_does(self):
        for number in [*range(1300), 1999, 2000, 2023, 12_100, 20_001, 345_678, 999_999]:
            assert in_words(number) == num2words(number)

    @pytest.mark.parametrize("options", [{}, {"num_frames": 3}, {"fps": 7.0}], ids=str)
    @pytest.mark.parametrize("frames", [1, 9, 31, 90])
    def test_an_encoded_video_is_sampled_as_the_reference_does(
        self, options, frames, tokenizer, reference, model, path_file
    ):
        if "num_frames" in options:  # a number larger than the number of frames is refused
            options = {"num_frames": min(3, frames)}
        video = encode_video(np.resize(moving_frames(20, 48, 32), (frames, 32, 48, 3)), fps=5)
        metadata = {"total_num_frames": frames, "fps": 5.0, "duration": frames / 5}
        expected = reference.processor(
            text="<video>Hm?",
            videos=[decode_all(video)],
            video_metadata=[metadata],
            do_sample_frames=True,
            return_tensors="pt",
            **{"num_frames": 5, "fps": 2, **options},
        )
        ids = tokenizer.tokenize([{"video": video, **options}, {"text": "Hm?"}], path_file).numpy()
        items = model.read(ids)
        assert plain_ids(ids, items).tolist() == expected["input_ids"][0].tolist()
        self.assert_arrays(expected, items, model)

    @pytest.mark.parametrize(
        "content",
        [
            [{"video": clip(5, 50, 40)}, {"text": "Which way?"}],
            [{"image": noise(61, 83)}, {"text": "Or "}, {"video": clip(3, 28, 90)}],
            [{"image": noise(61, 83)}, {"text": "What?"}],
        ],
        ids=["a video", "both", "an image"],
    )
    def test_a_chat_is_rendered_as_the_reference_does(self, content, reference, model, tokenizer, path_file):
        parts = [{"type": kind, kind: value} for item in content for kind, value in item.items()]
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": parts},
        ]
        text = reference.processor.apply_chat_template(messages, add_generation_prompt=True)
        images = [Image.fromarray(item["image"]) for item in content if "image" in item]
        videos = [item["video"] for item in content if "video" in item]
        expected = reference.processor(text=[text], images=images or None, videos=videos or None, return_tensors="pt")
        ids = tokenizer.tokenize_chat(messages, path_file).numpy()
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    def test_text_alone_cannot_make_a_video(self, reference, model, tokenizer, path_file):
        """A text that spells the marker of a video remains text. The marker is not a token."""
        text = "a <video> and <video"
        ids = tokenizer.tokenize([{"text": text}]).tolist()
        assert ids == reference.processor.tokenizer(text)["input_ids"]
        parts = [{"type": "text", "text": text}, {"type": "video", "video": clip(5, 50, 40)}]
        for found in (
            tokenizer.tokenize_chat([{"role": "user", "content": parts}], path_file).numpy(),
            tokenizer.tokenize([{"text": text}, {"video": clip(5, 50, 40)}], path_file).numpy(),
        ):
            (item,) = model.read(found)
            assert "a <video> and <video" in reference.processor.tokenizer.decode(found[: item.start].tolist())

    @pytest.mark.parametrize(
        ("frames", "options", "error", "named"),
        [(600, {}, LimitExceeded, r"600 frames .* limit is 585"), (3, {"fps": 2.0}, InputError, "frames have no rate")],
        ids=str,
    )
    def test_frames_that_cannot_be_taken_are_refused(self, frames, options, error, named, processor):
        video = np.zeros((frames, 4, 4, 3), np.uint8)
        with pytest.raises(error, match=named):
            processor.plan(Media("video", video, options=MediaOptions(**options)), video, {"video": 1})

    def test_embeddings_whose_grid_does_not_fit_are_refused(self, processor):
        assert processor.spelling("video", 8, (3, 0)) is None

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("video_preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("video_preprocessor_config", {"max_image_size": {"longest_edge": 56}}, "frames have 56 pixels"),
            ("video_preprocessor_config", {"video_processor_type": "Other"}, "video_processor_type is 'Other'"),
        ]
    )
