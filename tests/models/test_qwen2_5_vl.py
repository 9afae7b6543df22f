"""Tests for Qwen2.5-VL against transformers, on random weights."""

from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from mindie_mm.errors import InputError
from mindie_mm.inputs import Embeddings
from mindie_mm.nn.splice import plain_ids
from tests.media_samples import decode_all, encode_video, moving_frames
from tests.models.contract import FamilyContract, clip, noise
from tests.models.mindie_contract import MindIEContract
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.models.test_qwen2_vl import Qwen2VLReference
from tests.models.test_qwen2_vl import TestQwen2VL as Qwen2VLContract
from tests.transformers_reference import VideoMetadata
from tools.random_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS

PIXELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 3136,
    "max_pixels": 200_000,
}


class Reference(Qwen2VLReference):
    model_class = Qwen2_5_VLForConditionalGeneration
    processor_class = Qwen2_5_VLProcessor


class TestQwen25VL(MindIEContract, FamilyContract):
    name = "qwen2_5_vl"
    mindie_layout = "qwen2_vl"
    mindie_prompts = (
        [{"image": noise(90, 140)}, {"video": clip(4, 56, 84), "sample_fps": 8.0}, {"text": "Which way?"}],
    )
    mindie_seconds = 0.25
    mindie_arrays = Qwen2VLContract.mindie_arrays
    reference_class = Reference
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
        "two images": [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "a video": [{"video": clip(8, 112, 140)}, {"text": "Which way?"}],
        "mixed": [
            {"image": noise(61, 83)},
            {"text": "then"},
            {"video": clip(6, 84, 140)},
            {"image": noise(28, 28)},
        ],
    }
    assert_arrays = Qwen2VLContract.assert_arrays

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
        )
        ids = tokenizer.convert_tokens_to_ids
        text = {
            "vocab_size": 400,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        }
        vision = {
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 4,
        }
        config = Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
        save_model(out, Qwen2_5_VLForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))
        save_json(out, preprocessor_config=PIXELS, video_preprocessor_config=PIXELS)

    @pytest.mark.parametrize("fps", [Fraction(4), Fraction(30000, 1001), Fraction(3)], ids=str)
    def test_a_videos_positions_are_spaced_by_its_seconds(self, fps, reference, model, tokenizer, path_file):
        """The video has so many rows that transformers computes the same end of the video as the paper.

        transformers ignores time at the end of a video. This makes no difference if the row positions exceed the times.
        """
        data = encode_video(moving_frames(20, width=84, height=252), fps=fps)
        frames = torch.from_numpy(decode_all(data)).permute(0, 3, 1, 2)
        expected = reference.processor(
            text=[reference.markers["video"] + "Which way?"],
            videos=[frames],
            video_metadata=[VideoMetadata(total_num_frames=20, fps=float(fps))],
            fps=2.0,
            do_sample_frames=True,
            return_tensors="pt",
        )
        ids = tokenizer.tokenize([{"video": data}, {"text": "Which way?"}], path_file)
        items = model.read(ids.numpy())
        assert plain_ids(ids.numpy(), items).tolist() == expected["input_ids"][0].tolist()
        seconds = expected["second_per_grid_ts"]
        assert items[0].shape.grid[3] / 1e12 == pytest.approx(seconds[0].item())
        positions, _ = reference.model.model.get_rope_index(
            expected["input_ids"],
            expected["mm_token_type_ids"],
            video_grid_thw=expected["video_grid_thw"],
            second_per_grid_ts=seconds,
        )
        found = model.positions(len(ids), items)
        assert found.prompt[:, : items[0].stop].tolist() == positions[:, 0, : items[0].stop].tolist()
        assert found.prompt[:, items[0].stop].min() == found.prompt[:, : items[0].stop].max() + 1

    @pytest.mark.parametrize("rate", [None, 0.5, 3.0])
    def test_seconds_follow_the_rate_of_given_frames(self, rate, reference, model, tokenizer, path_file):
        frames = moving_frames(7, width=84, height=56)
        metadata = {} if rate is None else {"video_metadata": [VideoMetadata(7, rate, frames_indices=[*range(7)])]}
        expected = reference.processor(
            text=[reference.markers["video"]], videos=[frames], do_sample_frames=False, return_tensors="pt", **metadata
        )
        (item,) = model.read(tokenizer.tokenize([{"video": frames, "sample_fps": rate}], path_file).numpy())
        assert item.shape.grid[3] / 1e12 == pytest.approx(expected["second_per_grid_ts"][0].item())

    @pytest.mark.parametrize("grid", [(), (2, 4, 4), (2, 4, 6, 0, 0)], ids=str)
    def test_embeddings_of_another_grid_are_refused(self, grid, tokenizer, path_file):
        with pytest.raises(
            InputError, match=r"have 8 features and the grid .*; this model has no video|needs video_grid_thw"
        ):
            tokenizer.tokenize([{"video": Embeddings(np.zeros((8, 64), np.float32), grid)}], path_file)
