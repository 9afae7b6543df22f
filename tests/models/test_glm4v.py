"""Tests for GLM-4.1V and GLM-4.6V against transformers, on random weights."""

from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
)

from mindie_mm.errors import InputError
from mindie_mm.inputs import Media, MediaOptions
from mindie_mm.nn.splice import plain_ids
from tests.media_samples import decode_all, encode_video, moving_frames
from tests.models.contract import ExtremeShapes, FamilyContract, clip, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.models.test_qwen2_vl import TestQwen2VL as Qwen2VLContract
from tests.transformers_reference import AutoTokenizer, VideoMetadata

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif part['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEXT = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "image_size": 84,
    "initializer_range": 0.2,
}


class Reference(PretrainedReference):
    markers: ClassVar = {
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    }
    model_class = Glm4vForConditionalGeneration
    processor_class = Glm4vProcessor
    parts = (Glm4vImageProcessor, AutoTokenizer, Glm4vVideoProcessor)

    def __init__(self, path):
        """Let the model tell images from videos by mm_token_type_ids. By itself, it refuses prompts with both."""
        super().__init__(path)
        types = self.types = {}

        def masks(input_ids, inputs_embeds, **_):
            return [(types["last"] == kind).unsqueeze(-1) for kind in (1, 2)]

        self.model.model.get_placeholder_mask = masks

    def inputs(self, items):
        found = super().inputs(items)
        self.types["last"] = found["mm_token_type_ids"]
        return found


class GlmContract(ExtremeShapes, FamilyContract):
    """Tests that every GLM-V family must pass."""

    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
        "two images": [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "a video": [{"video": clip(4, 64, 100)}, {"text": "Which way?"}],
        "mixed": [
            {"image": noise(61, 83)},
            {"text": "then"},
            {"video": clip(5, 30, 20)},
            {"text": "then"},
            {"image": noise(32, 32)},
        ],
    }
    assert_arrays = Qwen2VLContract.assert_arrays

    def logits_of_inputs(self, reference, inputs):
        reference.types["last"] = inputs["mm_token_type_ids"]
        return super().logits_of_inputs(reference, inputs)

    processor_names: ClassVar[tuple[str, str, str]]
    """Names of the image, video and joint processor classes in the settings files."""

    @classmethod
    def configuration(cls, ids):
        """Return the class of the model and its configuration. `ids` returns the id of a token."""
        raise NotImplementedError

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, SPECIAL_TOKENS, eos_token="<|user|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
        )
        ids = tokenizer.convert_tokens_to_ids
        tokens = {
            "image_token_id": ids("<|image|>"),
            "video_token_id": ids("<|video|>"),
            **{f"{kind}_start_token_id": ids(f"<|begin_of_{kind}|>") for kind in ("image", "video")},
            **{f"{kind}_end_token_id": ids(f"<|end_of_{kind}|>") for kind in ("image", "video")},
        }
        model_class, config = cls.configuration(tokens)
        save_model(out, model_class, config, ids("<|user|>"), ids("<|endoftext|>"))
        image, video, both = cls.processor_names
        images = {"size": {"shortest_edge": 6272, "longest_edge": 200_000}, "image_processor_type": image}
        videos = {"size": {"shortest_edge": 6272, "longest_edge": 300_000}, "video_processor_type": video}
        files = {"preprocessor_config": images, "video_preprocessor_config": videos}
        save_json(out, **{name: {**settings, "processor_class": both} for name, settings in files.items()})

    @pytest.mark.parametrize(
        ("frames", "fps", "options"),
        [
            (20, Fraction(4), {}),
            (31, Fraction(30000, 1001), {}),
            (40, Fraction(10), {"fps": 5.0}),
            (3, Fraction(1, 2), {}),
            (1, Fraction(1, 2), {}),
        ],
        ids=str,
    )
    def test_frames_are_sampled_and_timed_as_the_reference_does(
        self, frames, fps, options, reference, model, tokenizer, path_file
    ):
        if set(options) & set(self.ignored_options):
            pytest.skip("the reference ignores this option")
        data = encode_video(moving_frames(frames, width=84, height=60), fps=fps)
        expected = reference.processor(
            text=[reference.markers["video"] + "Which way?"],
            videos=[torch.from_numpy(decode_all(data)).permute(0, 3, 1, 2)],
            video_metadata=[VideoMetadata(frames, float(fps), duration=frames / float(fps))],
            return_tensors="pt",
            **options,
        )
        ids = tokenizer.tokenize([{"video": data, **options}, {"text": "Which way?"}], path_file)
        items = model.read(ids.numpy())
        assert plain_ids(ids.numpy(), items).tolist() == expected["input_ids"][0].tolist()
        self.assert_arrays(expected, items, model)

    @pytest.mark.parametrize("sizes", [(2, 100, 140), (5, 300, 300), (9, 40, 1), (24, 4, 790), (11, 2000, 40)], ids=str)
    def test_frames_are_resized_as_the_reference_does(self, sizes, processor, reference):
        video = clip(*sizes)
        plan, _ = processor.plan(Media("video", video), video, {})
        expected = reference.processor.video_processor(videos=[video], do_sample_frames=False, return_tensors="pt")
        assert list(plan.grid[:3]) == expected["video_grid_thw"][0].tolist()

    def test_a_video_of_one_given_frame_is_refused(self, processor):
        video = clip(1, 40, 40)
        with pytest.raises(InputError, match=r"1 frames.*at least 2"):
            processor.plan(Media("video", video, MediaOptions()), video, {})

    test_a_changed_setting_is_refused = refusals(
        [
            ("video_preprocessor_config", {"do_sample_frames": False}, "do_sample_frames is False"),
            ("preprocessor_config", {"processor_class": "ZzProcessor"}, "'ZzProcessor' in preprocessor_config.json"),
            ("preprocessor_config", {"size": {"height": 4}}, "must have shortest_edge and longest_edge"),
        ]
    )


class TestGlm4V(GlmContract):
    name = "glm4v"
    reference_class = Reference
    processor_names = ("Glm4vImageProcessor", "Glm4vVideoProcessor", "Glm4vProcessor")
    ignored_options = ("num_frames",)

    @classmethod
    def configuration(cls, tokens):
        return Glm4vForConditionalGeneration, Glm4vConfig(text_config=TEXT, vision_config=VISION, **tokens)


class Glm46VReference(Reference):
    model_class = Glm46VForConditionalGeneration
    processor_class = Glm46VProcessor
    parts = (Glm46VImageProcessor, AutoTokenizer, Glm46VVideoProcessor)


class TestGlm46V(GlmContract):
    name = "glm4v"
    reference_class = Glm46VReference
    processor_names = ("Glm46VImageProcessor", "Glm46VVideoProcessor", "Glm46VProcessor")
    ignored_options = ("num_frames", "fps")

    @classmethod
    def configuration(cls, tokens):
        text, vision = {**TEXT, "model_type": "glm4v_text"}, {**VISION, "model_type": "glm4v_vision"}
        return Glm46VForConditionalGeneration, Glm46VConfig(text_config=text, vision_config=vision, **tokens)
