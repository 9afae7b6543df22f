"""Tests for Qwen3-VL against transformers, on random weights."""

from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from mindie_mm.errors import InputError, LimitExceeded, MediaError, UnsupportedCheckpoint
from mindie_mm.inputs import Embeddings, Media, MediaOptions
from mindie_mm.models import family_named
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.shm import release
from tests.media_samples import decode_all, encode_video, encoded, moving_frames, photograph
from tests.models.contract import FamilyContract, clip, noise
from tests.models.mindie_contract import MindIEContract
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.models.test_qwen2_vl import Qwen2VLReference
from tests.models.test_qwen2_vl import TestQwen2VL as Qwen2VLContract
from tests.transformers_reference import AutoTokenizer, Qwen2VLImageProcessor, VideoMetadata
from tools.random_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS

PIXELS = {"patch_size": 16, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGES = {**PIXELS, "size": {"shortest_edge": 4096, "longest_edge": 200_000}}
VIDEOS = {**PIXELS, "size": {"shortest_edge": 4096, "longest_edge": 300_000}, "max_frames": 24}


VISION_TOKENS = ("vision_start", "vision_end", "image_pad", "video_pad")


class Reference(Qwen2VLReference):
    model_class = Qwen3VLForConditionalGeneration
    processor_class = Qwen3VLProcessor
    parts = (Qwen2VLImageProcessor, AutoTokenizer, Qwen3VLVideoProcessor)


class TestQwen3VL(MindIEContract, FamilyContract):
    name = "qwen3_vl"
    mindie_layout = "qwen3_vl"
    mindie_prompts = (
        [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(64, 60)}, {"text": "?"}],
        [{"text": "Look: "}, {"video": clip(4, 130, 200)}, {"text": "Which way?"}],
        [{"image": noise(130, 130)}, {"video": clip(5, 30, 20)}, {"text": "then"}, {"image": noise(32, 32)}],
        [{"video": clip(4, 130, 200)}, {"image": noise(61, 83)}, {"video": clip(2, 90, 64)}],
    )
    reference_class = Reference
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
        "two images": [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "a video": [{"video": clip(4, 64, 100)}, {"text": "Which way?"}],
        "a long video": [{"video": clip(4, 10, 700)}, {"text": "Which way?"}],
        "mixed": [
            {"image": noise(61, 83)},
            {"text": "then"},
            {"video": clip(5, 30, 20)},
            {"text": "then"},
            {"image": noise(32, 32)},
        ],
    }
    assert_arrays = Qwen2VLContract.assert_arrays

    def mindie_keeps(self, ids):
        """Return True for all ids except the ids that enclose a whole video, bool [T]."""
        start, end, *pads = (SPECIAL_TOKENS.index(f"<|{name}|>") for name in VISION_TOKENS)
        pads = np.isin(np.pad(ids, 1, constant_values=-1), pads)
        return ~((ids == start) & ~pads[2:] | (ids == end) & ~pads[:-2])

    def mindie_arrays(self, prompt, items, model, ids):
        arrays = []
        for kind in ("image", "video"):
            own = [item for item in items if item.shape.kind == kind]
            arrays += [
                np.concatenate([model.normalized(item).cpu().numpy() for item in own]) if own else None,
                np.array([item.shape.grid[:3] for item in own], np.int32) if own else None,
            ]
        return arrays

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
        )
        ids = tokenizer.convert_tokens_to_ids
        text = {
            "vocab_size": 400,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 128,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 1e6},
        }
        vision = {
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        }
        config = Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
        save_model(out, Qwen3VLForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))
        save_json(out, preprocessor_config=IMAGES, video_preprocessor_config=VIDEOS)

    def test_mindies_words_need_ten_placeholders_in_the_first_run(self, mindie, path_file):
        with pytest.raises(LimitExceeded, match=r"media item 0 \(image\): the image has 6 features; .* at least 10"):
            mindie.tokenize([{"image": noise(61, 83)}, {"image": noise(200, 290)}], path_file)
        assert not path_file.exists()

    def test_a_broken_item_leaves_no_segments_of_the_prompt(self, mindie, path_file):
        broken = encoded(photograph("coffee.png", (300, 300)))[:3000]
        with pytest.raises(MediaError, match=r"media item 1 \(image\): the JPEG image of 300x300 pixels is broken"):
            mindie.tokenize([{"image": noise(200, 290)}, {"image": broken}], path_file)
        assert path_file.read_text().count("psm_") == 2
        assert release(path_file) == 0

    @pytest.mark.parametrize(
        ("frames", "fps", "options"),
        [
            (20, Fraction(4), {}),
            (31, Fraction(30000, 1001), {}),
            (50, Fraction(3), {"num_frames": 7}),
            (40, Fraction(10), {"fps": 5.0}),
            (3, Fraction(1, 2), {}),
        ],
        ids=str,
    )
    def test_frames_are_sampled_and_timed_as_the_reference_does(
        self, frames, fps, options, reference, model, tokenizer, path_file
    ):
        data = encode_video(moving_frames(frames, width=84, height=60), fps=fps)
        expected = reference.processor(
            text=[reference.markers["video"] + "Which way?"],
            videos=[torch.from_numpy(decode_all(data)).permute(0, 3, 1, 2)],
            video_metadata=[VideoMetadata(total_num_frames=frames, fps=float(fps))],
            return_tensors="pt",
            **({"fps": None} | options if "num_frames" in options else options),
        )
        decoded = {"video": decode_all(data), "sample_fps": float(fps), **(options or {"fps": 2.0})}
        for video in ({"video": data, **options}, decoded):
            ids = tokenizer.tokenize([video, {"text": "Which way?"}], path_file)
            items = model.read(ids.numpy())
            assert plain_ids(ids.numpy(), items).tolist() == expected["input_ids"][0].tolist()
            self.assert_arrays(expected, items, model)

    @pytest.mark.parametrize("sizes", [(2, 100, 140), (5, 300, 300), (9, 40, 1), (24, 4, 790), (11, 2000, 40)], ids=str)
    @pytest.mark.parametrize("cap", [None, True])
    def test_frames_are_resized_as_the_reference_does(self, sizes, cap, path, tmp_path):
        videos = {**VIDEOS, "fps": None, "cap_pixels_per_frame": cap, "max_video_tokens": 5, "min_frames": 2}
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        save_json(tmp_path, preprocessor_config=IMAGES, video_preprocessor_config=videos)
        processor = family_named(self.name).processor(Checkpoint.open(tmp_path))
        video = clip(*sizes)
        plan, _ = processor.plan(Media("video", video), video, {})
        expected = Qwen3VLVideoProcessor.from_pretrained(tmp_path)(videos=[video], return_tensors="pt")
        assert list(plan.grid[:3]) == expected["video_grid_thw"][0].tolist()

    def test_a_video_of_one_frame_is_refused(self, processor):
        video = clip(1, 40, 40)
        with pytest.raises(InputError, match=r"1 frames.*at least 2"):
            processor.plan(Media("video", video, MediaOptions()), video, {})

    @pytest.mark.parametrize("change", [{"do_sample_frames": False}, {"num_frames": 8}], ids=str)
    def test_unsupported_sampling_is_refused_by_name(self, change, path, tmp_path):
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        save_json(tmp_path, preprocessor_config=IMAGES, video_preprocessor_config={**VIDEOS, **change})
        with pytest.raises(UnsupportedCheckpoint, match=next(iter(change))):
            family_named(self.name).processor(Checkpoint.open(tmp_path))

    @pytest.mark.parametrize("grid", [(), (2, 4, 4), (2, 4, 6, 0, 0)], ids=str)
    def test_embeddings_of_another_grid_are_refused(self, grid, tokenizer, path_file):
        with pytest.raises(
            InputError, match=r"have 8 features and the grid .*; this model has no video|needs video_grid_thw"
        ):
            tokenizer.tokenize([{"video": Embeddings(np.zeros((8, 192), np.float32), grid)}], path_file)
