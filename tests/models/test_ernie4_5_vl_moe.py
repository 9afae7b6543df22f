"""Tests for ERNIE-4.5-VL against transformers, on random weights."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from PIL import Image, ImageFont
from safetensors.torch import load_file
from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from mindie_mm.models import family_named
from mindie_mm.models.ernie4_5_vl_moe import _clock
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from tests.models.contract import ExtremeShapes, FamilyContract, clip, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import changed, save_json, save_model, save_tokenizer
from tests.models.test_qwen2_vl import TestQwen2VL as Qwen2VLContract
from tests.transformers_reference import AutoTokenizer

# isort: split
from transformers.models.ernie4_5_vl_moe.image_processing_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessor
from transformers.models.ernie4_5_vl_moe.processing_ernie4_5_vl_moe import Ernie4_5_VLMoeProcessor
from transformers.models.ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe import Ernie4_5_VLMoeVideoProcessor

FONT = "Roboto-Regular.ttf"
MARKERS = {
    kind: tuple(f"<|{kind.upper()}_{part}|>" for part in ("START", "PLACEHOLDER", "END")) for kind in ("image", "video")
}
TOKENS = ("<unk>", "<|begin_of_sentence|>", "</s>", *MARKERS["image"], *MARKERS["video"])
PIXELS = {"patch_size": 14, "merge_size": 2, "resample": 3}
IMAGES = {
    **PIXELS,
    "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 60_000},
    "temporal_patch_size": 1,
}
VIDEOS = {
    **PIXELS,
    "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 20_000},
    "temporal_patch_size": 2,
    "min_frames": 2,
    "max_frames": 24,
    "do_sample_frames": True,
    "draw_on_frames": True,
    "font": FONT,
}
# As in the published template, which also numbers the items and may open the reasoning.
TEMPLATE = """\
{%- set count = namespace(image=0, video=0) -%}
{{- "<|begin_of_sentence|>" -}}
{%- for message in messages -%}
    {{- "User: " if message.role == "user" else "Assistant: " -}}
    {%- for part in message.content -%}
        {%- if part.type == "image" -%}
            {%- set count.image = count.image + 1 -%}
            Picture {{ count.image }}:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>
        {%- elif part.type == "video" -%}
            {%- set count.video = count.video + 1 -%}
            Video {{ count.video }}:<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>
        {%- else -%}
            {{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "\\nAssistant: " -}}
    {{- "<think>" if enable_thinking is defined and enable_thinking else "<think>\\n\\n</think>\\n\\n" -}}
{%- endif -%}"""
TEXT = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
    "moe_intermediate_size": [48, 32],
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "initializer_range": 0.2}


class Reference(PretrainedReference):
    markers: ClassVar = {kind: "".join(tokens) for kind, tokens in MARKERS.items()}
    model_class = Ernie4_5_VLMoeForConditionalGeneration
    processor_class = Ernie4_5_VLMoeProcessor
    parts = (Ernie4_5_VLMoeImageProcessor, AutoTokenizer, Ernie4_5_VLMoeVideoProcessor)


class TestErnie45VLMoe(ExtremeShapes, FamilyContract):
    name = "ernie4_5_vl_moe"
    reference_class = Reference
    chooses_experts = True
    assert_arrays = Qwen2VLContract.assert_arrays
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
        "two images": [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        "a video": [{"video": clip(4, 64, 100)}, {"text": "Which way?"}],
        "mixed": [
            {"image": noise(61, 83)},
            {"text": "then"},
            {"video": clip(5, 30, 50)},
            {"text": "then"},
            {"image": noise(32, 32)},
        ],
    }

    @classmethod
    def write_checkpoint(cls, out):
        named = {
            f"{kind}_{name}": token
            for kind, tokens in MARKERS.items()
            for name, token in zip(("start_token", "token", "end_token"), tokens, strict=True)
        }
        ids = save_tokenizer(
            out,
            TOKENS,
            bos_token="<|begin_of_sentence|>",
            eos_token="</s>",
            pad_token="<unk>",
            chat_template=TEMPLATE,
            extra_special_tokens=named,
        ).convert_tokens_to_ids
        (out / FONT).write_bytes(ImageFont.load_default(10).font_bytes)
        save_json(out, preprocessor_config=IMAGES, video_preprocessor_config=VIDEOS)
        config = Ernie4_5_VLMoeConfig(
            text_config=TEXT, vision_config=VISION, **{f"{name}_id": ids(token) for name, token in named.items()}
        )
        save_model(out, Ernie4_5_VLMoeForConditionalGeneration, config, ids("</s>"), ids("<unk>"))

    def test_a_chat_is_rendered_as_the_reference_does(self, reference, model, tokenizer, path_file):
        pixels, frames = noise(61, 83), clip(4, 64, 100)
        content = [
            {"type": "image", "image": pixels},
            {"type": "video", "video": frames},
            {"type": "text", "text": "Which?"},
        ]
        messages = [{"role": "user", "content": content}]
        text = reference.processor.apply_chat_template(messages, chat_template=TEMPLATE, add_generation_prompt=True)
        assert text.startswith(f"<|begin_of_sentence|>User: Picture 1:{Reference.markers['image']}Video 1:")
        assert text.endswith("Which?\nAssistant: <think>\n\n</think>\n\n")
        expected = reference.processor(
            text=[text], images=[Image.fromarray(pixels)], videos=[frames], do_sample_frames=False, return_tensors="pt"
        )
        ids = tokenizer.tokenize_chat(messages, path_file).numpy()
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    def test_weights_have_their_published_names(self, path):
        """The reference splits the experts of both kinds, and writes them in the published layout, too."""
        names = load_file(path / "model.safetensors").keys()
        assert {"model.layers.1.mlp.gate.weight_1", "model.layers.1.mlp.experts.7.up_proj.weight"} <= names
        assert "model.resampler_model.spatial_linear.0.weight" in names

    @pytest.mark.parametrize("time_s", [0, 0.04, 59.999, 61.5, 3661.25, 36000])
    def test_times_are_written_as_the_reference_does(self, time_s, reference):
        assert f"time: {_clock(time_s)}" == reference.processor.video_processor._convert_timestamp(time_s)

    def test_frames_without_times_need_no_font(self, path, reference, tmp_path):
        out = changed(path, tmp_path / "other", "video_preprocessor_config", {"draw_on_frames": False})
        (out / FONT).unlink()
        frames = clip(4, 64, 100)
        found = planned(family_named(self.name).processor(Checkpoint.open(out)), frames)
        theirs = reference.processor.video_processor
        expected = theirs(frames, draw_on_frames=False, do_sample_frames=False, do_normalize=False, do_rescale=False)
        assert np.array_equal(found, expected["pixel_values_videos"].numpy())
        with_times = planned(family_named(self.name).processor(Checkpoint.open(path)), frames)
        assert not np.array_equal(found, with_times)

    def test_frames_too_small_for_letters_are_refused(self, processor):
        frames = clip(2, 9, 40)
        with pytest.raises(LimitExceeded, match=r"40x9 pixels; .*must have at least 10 pixels"):
            processor.plan(Media("video", frames), frames, {"video": 1})

    def test_a_missing_or_broken_font_is_refused(self, path, tmp_path):
        out = changed(path, tmp_path / "other", "config", {})
        (out / FONT).write_bytes(b"no font")
        self.assert_refused(out, rf"{FONT} is not a font: .*Copy it from the original repository")
        (out / FONT).unlink()
        self.assert_refused(out, f"has no {FONT}. Copy it from the original repository")

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("video_preprocessor_config", {"temporal_patch_size": 4}, "temporal_patch_size"),
            ("video_preprocessor_config", {"do_sample_frames": False}, "do_sample_frames"),
            ("preprocessor_config", {"patch_size": 16}, "patch_size is 16, but the tower"),
            ("preprocessor_config", {"do_resize": False}, "do_resize"),
        ]
    )


def planned(processor, frames):
    """Return the patches of a video in the order of transformers' processor, [patches, 3 * patch * patch]."""
    plan, write = processor.plan(Media("video", frames), frames, {"video": 1})
    arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
    write(arrays)
    (patches,) = arrays.values()
    return patches.reshape(len(patches), -1, 3).swapaxes(1, 2).reshape(len(patches), -1)
