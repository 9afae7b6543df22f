"""Tests for Molmo 2 against transformers, on random weights."""

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import Molmo2Config, Molmo2ForConditionalGeneration, Molmo2Processor
from transformers.models.molmo2.image_processing_molmo2 import Molmo2ImageProcessor
from transformers.models.molmo2.video_processing_molmo2 import Molmo2VideoProcessor

from mindie_mm.engine.core import Engine
from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import Embeddings, Media, MediaOptions
from mindie_mm.models import family_named
from mindie_mm.models._crops import choose_tiling
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.settings.config import EngineConfig
from mindie_mm.tokenize import Tokenizer
from tests.engine.test_prefix_cache import cached
from tests.media_samples import decode_all, encode_video, moving_frames, photograph
from tests.models.contract import IMAGE_PROMPTS, FamilyContract, clip, noise, refusals, run
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer, without_token
from tests.transformers_reference import AutoTokenizer

SPECIAL = (
    *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>"),
    *("<frame_start>", "<frame_end>", "<|video|>"),
)
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "image_size": [20, 20],
    "patch_size": 4,
    "initializer_range": 0.2,  # large enough for images to change the logits
}
ADAPTER = {
    "vision_feature_layer": [2, -3],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "text_hidden_size": 48,
    "initializer_range": 0.2,
}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
SIDE = {"size": {"height": 20, "width": 20}, "patch_size": 4}
PIXELS = {
    **SIDE,
    "image_processor_type": "Molmo2ImageProcessor",
    "max_crops": 6,
    "overlap_margins": [1, 1],
    "image_mean": [0.4, 0.5, 0.6],
}
FRAMES = {
    **SIDE,
    "video_processor_type": "Molmo2VideoProcessor",
    "num_frames": 6,
    "do_rescale": True,
    "do_normalize": True,
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}{{ '<|' + part['type'] + '|>' }}{% endif %}{% endfor %}{% endfor %}"
)


def write(out, pixels=(), frames=(), text=(), adapter=(), stated=(), **tokens):
    """Write a checkpoint in which the ids of media tokens follow the vocabulary, as in the published checkpoints."""
    tokens = tokens or {"eos_token": "<|end|>"}
    tokenizer = save_tokenizer(out, ("<|end|>", "<s>", "<pad>"), pad_token="<pad>", chat_template=TEMPLATE, **tokens)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    tokenizer.save_pretrained(out)
    ids = tokenizer.convert_tokens_to_ids
    config = Molmo2Config(
        vision_config=VISION,
        adapter_config={**ADAPTER, **dict(adapter)},
        text_config={**TEXT, "vocab_size": size, "additional_vocab_size": len(SPECIAL) + 3, **dict(text)},
        image_start_token_id=ids("<im_start>"),
        low_res_image_start_token_id=ids("<low_res_im_start>"),
        image_end_token_id=ids("<im_end>"),
        image_patch_id=ids("<im_patch>"),
        frame_start_token_id=ids("<frame_start>"),
        frame_end_token_id=ids("<frame_end>"),
    )
    save_model(out, Molmo2ForConditionalGeneration, config, ids("<|end|>"), ids("<pad>"))
    save_json(
        out,
        preprocessor_config={**PIXELS, **dict(pixels)},
        video_preprocessor_config={**FRAMES, **dict(frames)},
        processor_config=dict(stated),
    )


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<|image|>", "video": "<|video|>"}
    model_class = Molmo2ForConditionalGeneration
    processor_class = Molmo2Processor
    parts = (Molmo2ImageProcessor, Molmo2VideoProcessor, AutoTokenizer)


class TestMolmo2(FamilyContract):
    name = "molmo2"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = {
        **IMAGE_PROMPTS,
        "a dot": [{"text": "A dot:"}, {"image": noise(2, 3)}],
        "a video": [{"text": "See"}, {"video": clip(6, 50, 40)}, {"text": "Which way?"}],
        "a short video": [{"video": clip(2, 20, 20)}, {"text": "Which way?"}],
    }

    def test_bidirectional_spans_equal_the_references_token_types(self, model, reference, tokenized):
        for name, items in self.prompts.items():
            types = reference.inputs(items)["mm_token_type_ids"][0]
            span_ids = model.bidirectional_spans(len(types), model.read(tokenized[name].numpy()))
            expected = None if name == "text" else (types - 1).tolist()
            assert (None if span_ids is None else span_ids.tolist()) == expected, name

    def test_a_prefix_is_not_reused_where_later_images_differ(self, model, tokenizer, reference, path_file):
        """Only the text before the first image is reused, because the tokens of all images attend to each other."""
        first, *others = (noise(30, 40, seed) for seed in range(3))
        question = {"text": "What is in the image? Describe this picture."}
        prompts = [[question, {"image": first}, {"image": other}, {"text": "?"}] for other in others]
        tokenized = [tokenizer.tokenize(items, path_file) for items in prompts]
        engine = Engine(model, EngineConfig(kv_block_size=4))
        assert cached(engine, tokenized[0]) == 0
        assert cached(engine, tokenized[1]) == (model.read(tokenized[0].numpy())[0].slots[0] - 1) // 4 * 4
        assert cached(engine, tokenized[0]) >= len(tokenized[0]) - 4
        for items, ids in zip(prompts, tokenized, strict=True):
            outputs, errors = run(engine, [ids], max_tokens=16)
            assert not errors
            assert outputs[0] == reference.generate(items, 16)

    def test_a_marker_need_not_be_a_token(self, path, reference, model, tmp_path, path_file):
        other = without_token(path, tmp_path / "other", "<|video|>")
        with Tokenizer.from_pretrained(other) as tokenizer:
            for name, items in self.prompts.items():
                ids = tokenizer.tokenize(items, path_file).numpy()
                expected = reference.inputs(items)["input_ids"][0].tolist()
                assert plain_ids(ids, model.read(ids)).tolist() == expected, name

    @pytest.mark.parametrize(
        "written",
        [
            {"stated": {"image_use_col_tokens": False, "use_single_crop_col_tokens": True}, "bos_token": "<s>"},
            {"stated": {"video_use_col_tokens": True, "use_frame_special_tokens": False}},
            {"stated": {"use_single_crop_col_tokens": False, "use_single_crop_start_token": False}},
            {"pixels": {"overlap_margins": [2, 1], "pooling_size": [3, 2]}, "frames": {"pooling_size": [4, 5]}},
            {
                "pixels": {"overlap_margins": [0, 1], "do_normalize": False},
                "frames": {"do_rescale": False, "do_normalize": None},
            },
            {"text": {"qk_norm_type": "olmo", "norm_after": True, "attention_bias": True}},
            {
                "text": {
                    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
                    "rope_scaling_layers": [1],
                },
                "adapter": {"vision_feature_layer": [1]},
            },
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(self, written, tmp_path, path_file):
        written = {**written, "eos_token": "<|end|>"}
        write(tmp_path, **written)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_chat_ids_equal_the_references(self, tokenizer, reference, model, path_file):
        image = noise(40, 90)
        content = [{"type": "image", "image": image}, {"type": "text", "text": "Hm?"}]
        ids = tokenizer.tokenize_chat([{"role": "user", "content": content}], path_file).numpy()
        expected = reference.inputs([{"image": image}, {"text": "Hm?"}])
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    def test_photographs_of_the_released_sizes_equal_the_references(self, path, tmp_path):
        """Every pixel is compared.

        The float resize is rounded, so its result must not depend on the order of channels.
        """
        settings = {"image_processor_type": "Molmo2ImageProcessor"}
        other = shutil.copytree(path, tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        config["vision_config"] |= {"image_size": [378, 378], "patch_size": 14, "num_position_embeddings": 729}
        save_json(other, config=config, preprocessor_config=settings, video_preprocessor_config={})
        processor = family_named(self.name).processor(Checkpoint.open(other))
        for size in ((640, 480), (1000, 300), (50, 900)):
            pixels = np.asarray(photograph(size=size))
            plan, write = processor.plan(Media("image", pixels), pixels, {"image": 1})
            arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
            write(arrays)
            raw = Molmo2ImageProcessor(do_rescale=False, do_normalize=False)
            expected = raw([photograph(size=size)], return_tensors="pt")
            rows, columns = plan.grid
            assert expected["image_num_crops"].tolist() == [1 + rows * columns]
            squares = expected["pixel_values"].view(-1, 27, 27, 14, 14, 3).transpose(2, 3).reshape(-1, 378, 378, 3)
            assert np.array_equal(arrays["whole"], squares[0])
            step = 19 * 14
            for index, square in enumerate(squares[1:].numpy()):
                top, left = index // columns * step, index % columns * step
                assert np.array_equal(arrays["detail"][top : top + 378, left : left + 378], square)

    def test_tilings_equal_the_references(self):
        images = Molmo2ImageProcessor()
        for height in range(1, 1500, 37):
            for width in range(1, 1500, 41):
                _, crops = images.get_image_grid_and_crops(height, width)
                rows, columns = choose_tiling(height - 112, width - 112, 266, 8)
                assert rows * columns + 1 == crops
                (*_, high, wide), _ = images.get_image_grid_and_crops(height, width)
                assert (high, wide) == ((19 * rows + 9) // 2, (19 * columns + 9) // 2)

    @pytest.mark.parametrize("options", [{}, {"num_frames": 3}, {"fps": 1.5}], ids=str)
    @pytest.mark.parametrize("frames", [1, 9, 31, 40])
    def test_an_encoded_video_is_sampled_as_the_reference_does(
        self, options, frames, tokenizer, reference, model, path_file
    ):
        asked = {}
        if "num_frames" in options:  # without max_fps, the reference would sample fewer frames from such short videos
            options = {"num_frames": min(3, frames)}
            asked = {"max_fps": 100}
        video = encode_video(np.resize(moving_frames(20, 48, 32), (frames, 32, 48, 3)), fps=20)
        expected = reference.processor(
            text="<|video|>Hm?",
            videos=[torch.from_numpy(decode_all(video))],
            video_metadata=[{"total_num_frames": frames, "fps": 20.0, "duration": frames / 20}],
            return_tensors="pt",
            **asked,
            **({"num_frames": None, **options} if "fps" in options else options),
        )
        ids = tokenizer.tokenize([{"video": video, **options}, {"text": "Hm?"}], path_file).numpy()
        items = model.read(ids)
        assert plain_ids(ids, items).tolist() == expected["input_ids"][0].tolist()
        self.assert_arrays(expected, items, model)

    def test_an_index_past_the_last_frame_is_dropped(self, processor):
        """The reference selects frame 2999, which does not exist, because 31 steps of 2999 / 31 are rounded."""
        video = np.zeros((2999, 1, 1, 3), np.uint8)
        with pytest.raises(LimitExceeded, match=r"31 frames .* limit is 6"):
            processor.plan(Media("video", video, options=MediaOptions(num_frames=31)), video, {"video": 1})
        processor._max_frames = 64
        plan, _ = processor.plan(Media("video", video, options=MediaOptions(num_frames=31)), video, {"video": 1})
        assert len(plan.grid) == 31

    @pytest.mark.parametrize(
        ("items", "error", "named"),
        [
            ([{"video": clip(1, 8, 8)}, {"image": noise(8, 8)}], InputError, "accepts only one kind per prompt"),
            ([{"image": noise(8, 8)}, {"video": clip(1, 8, 8)}], InputError, "accepts only one kind per prompt"),
            ([{"video": clip(1, 8, 8)}, {"video": clip(2, 8, 8)}], LimitExceeded, "limit is 1"),
            ([{"video": clip(9, 8, 8)}], LimitExceeded, "9 frames .* limit is 6"),
            ([{"audio": np.zeros(100, np.float32)}], InputError, "does not accept audio"),
        ],
        ids=str,
    )
    def test_unsupported_media_are_refused(self, items, error, named, tokenizer, path_file):
        with pytest.raises(error, match=named):
            tokenizer.tokenize(items, path_file)

    @pytest.mark.parametrize(
        ("kind", "num_features", "grid"),
        [("image", 18, ()), ("image", 18, (1, 2)), ("image", 18, (0, 1)), ("video", 8, (3,)), ("video", 4, (-1,))],
    )
    def test_embeddings_whose_grid_does_not_fit_are_refused(self, kind, num_features, grid, processor):
        assert processor.spelling(kind, num_features, grid) is None

    def test_an_image_with_embeddings_of_a_video_is_refused(self, tokenizer, processor, path_file):
        features = np.zeros((4, processor.feature_width), np.float32)
        items = [{"image": noise(8, 8)}, {"video": Embeddings(features, (0,))}]
        for given in (items, items[::-1]):
            with pytest.raises(InputError, match="accepts only one kind per prompt"):
                tokenizer.tokenize(given, path_file)

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"image_patch_id": 2}, "image_patch_id is 2"),
            ("preprocessor_config", {"size": {"height": 24, "width": 24}}, "the tower takes"),
            ("preprocessor_config", {"size": {"height": 20, "width": 40}}, "the tower takes"),
            ("preprocessor_config", {"patch_size": 5}, "patch_size is 5"),
            ("preprocessor_config", {"resample": 3}, "resample is 3"),
            ("preprocessor_config", {"overlap_margins": [3, 2]}, r"overlap_margins \(3, 2\) do not fit"),
            ("preprocessor_config", {"image_processor_type": "Other"}, "image_processor_type is 'Other'"),
            ("video_preprocessor_config", {"do_sample_frames": False}, "do_sample_frames is False"),
            ("video_preprocessor_config", {"fps": 2}, "fps is 2"),
            ("video_preprocessor_config", {"video_processor_type": "Other"}, "video_processor_type is 'Other'"),
            ("tokenizer_config", {"eos_token": None}, "no bos_token and no eos_token"),
        ]
    )
