"""Tests for Qwen2.5-Omni's thinker against transformers, on random weights."""

import functools
import io
import json
from fractions import Fraction
from typing import ClassVar

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers import WhisperFeatureExtractor as FeatureExtractor

from mindie_mm.batch.output.collate import collate
from mindie_mm.engine.core import Engine
from mindie_mm.errors import InputError, LimitExceeded, UnsupportedCheckpoint
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import packed_logits
from mindie_mm.nn.splice import plain_ids
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tests.audio_samples import encode_audio, tone
from tests.media_samples import decode_all, encode_video, moving_frames
from tests.models.contract import FamilyContract, Unpacked, clip, noise, run
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import read_model, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, VideoMetadata

NAMES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *NAMES.values())
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW_S = 5
WEIGHTS = {"initializer_range": 0.1}  # large enough for media to change the logits far beyond the tolerance
VIDEO_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 112 * 140}
VIDEO = clip(6, 84, 112)


class SmallVideosProcessor(Qwen2_5OmniProcessor):
    """Reference processor that accepts small videos.

    Its base class enlarges videos to at least 128 * 28 * 28 pixels.
    """

    videos_kwargs: ClassVar = {"size": VIDEO_SIZE}


class Reference(BaseReference):
    markers: ClassVar = {
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    }

    def inputs(self, items):
        given = {
            "images": [item["image"] for item in items if "image" in item],
            "videos": [item["video"] for item in items if "video" in item],
            "audio": [item["audio"] for item in items if "audio" in item],
        }
        return self.processor(
            text=[self.text(items)], return_tensors="pt", **{name: media for name, media in given.items() if media}
        )


def write_checkpoint(out, processor=SmallVideosProcessor):
    tokenizer = save_tokenizer(
        out,
        TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMES,
        chat_template=CHAT_TEMPLATE,
    )
    ids = tokenizer.convert_tokens_to_ids
    pixels = {"min_pixels": 3136, "max_pixels": 200_000}
    processor(
        Qwen2VLImageProcessor(**pixels),
        Qwen2VLVideoProcessor(**pixels),
        FeatureExtractor(feature_size=16, chunk_length=WINDOW_S),
        AutoTokenizer.from_pretrained(out),
    ).save_pretrained(out)
    if processor is SmallVideosProcessor:
        file = out / "processor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "videos_kwargs": processor.videos_kwargs}))
    config = Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": 16,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "max_source_positions": 100,
            "n_window": 50,
            "output_dim": 64,
            **WEIGHTS,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            **WEIGHTS,
        },
        text_config={
            "vocab_size": 400,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
            **WEIGHTS,
        },
        image_token_index=ids("<|IMAGE|>"),
        video_token_index=ids("<|VIDEO|>"),
        audio_token_index=ids("<|AUDIO|>"),
        vision_start_token_id=ids("<|vision_bos|>"),
        vision_end_token_id=ids("<|vision_eos|>"),
        audio_start_token_id=ids("<|audio_bos|>"),
        audio_end_token_id=ids("<|audio_eos|>"),
    )
    save_model(out, Qwen2_5OmniThinkerForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))


def make_reference(path, processor=SmallVideosProcessor):
    return Reference(
        read_model(Qwen2_5OmniThinkerForConditionalGeneration, path),
        processor(
            Qwen2VLImageProcessor.from_pretrained(path),
            Qwen2VLVideoProcessor.from_pretrained(path),
            FeatureExtractor.from_pretrained(path),
            AutoTokenizer.from_pretrained(path),
        ),
    )


class TestQwen25Omni(FamilyContract):
    name = "qwen2_5_omni"
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
        "two images": [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "a video": [{"video": VIDEO}, {"text": "Which way?"}],
        "one clip": [{"text": "Listen: "}, {"audio": tone(0.53)}, {"text": "What is it?"}],
        "two clips": [{"audio": tone(0.21, hertz=900)}, {"text": " and "}, {"audio": tone(2.71)}, {"text": "differ?"}],
        "a single slot": [{"text": "Hark"}, {"audio": tone(0.03)}, {"text": "?"}],
        "the whole window": [{"audio": tone(WINDOW_S)}, {"text": "?"}],
        "all": [
            {"text": "See "},
            {"image": noise(61, 83)},
            {"text": ", "},
            {"video": clip(4, 112, 84)},
            {"text": ", hear "},
            {"audio": tone(1.17)},
            {"text": " and "},
            {"audio": tone(0.03)},
            {"image": noise(28, 28)},
            {"text": "then say."},
        ],
        "audio, then video": [{"audio": tone(0.4)}, {"video": VIDEO}, {"text": "?"}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        write_checkpoint(out)

    @classmethod
    def make_reference(cls, path):
        return make_reference(path)

    @pytest.mark.parametrize("name", ["all", "a video", "two images", "audio, then video"])
    def test_positions_equal_the_references(self, name, reference, model, tokenized):
        inputs = reference.inputs(self.prompts[name])
        self.assert_positions(reference, model, tokenized[name], inputs)

    @pytest.mark.parametrize("fps", [None, 0.6, 1.2, 3.0])
    def test_a_videos_positions_are_spaced_by_its_seconds(self, fps, reference, model, tokenizer, path_file):
        data = encode_video(moving_frames(40, width=112, height=84), fps=Fraction(4))
        asked = {} if fps is None else {"fps": fps}
        ids = tokenizer.tokenize([{"video": data, **asked}, {"text": "Which way?"}], path_file)
        video = reference.processor.video_processor
        rate = fps or 2.0
        indices = video.sample_frames(VideoMetadata(total_num_frames=40, fps=4.0), fps=rate).tolist()
        inputs = reference.processor(
            text=[reference.markers["video"] + "Which way?"],
            videos=[decode_all(data)[indices]],
            return_tensors="pt",
            videos_kwargs={"fps": rate, "do_sample_frames": False},
        )
        assert inputs["video_second_per_grid"].tolist() == pytest.approx([2 / rate])
        self.assert_positions(reference, model, ids, inputs)

    @pytest.mark.parametrize("rate", [None, 0.5, 3.0])
    def test_seconds_follow_the_rate_of_given_frames(self, rate, reference, model, tokenizer, path_file):
        frames = moving_frames(7, width=112, height=84)
        ids = tokenizer.tokenize([{"video": frames, "sample_fps": rate}, {"text": "Which way?"}], path_file)
        inputs = reference.processor(
            text=[reference.markers["video"] + "Which way?"],
            videos=[frames],
            return_tensors="pt",
            videos_kwargs={"fps": rate, "do_sample_frames": False},
        )
        self.assert_positions(reference, model, ids, inputs)

    @pytest.mark.parametrize(("options", "taken"), [({"num_frames": 6}, 6), ({"max_frames": 4}, 4), ({"fps": 2.0}, 6)])
    def test_seconds_follow_the_number_of_sampled_frames(self, options, taken, model, tokenizer, path_file):
        frames = moving_frames(12, width=56, height=56)
        ids = tokenizer.tokenize([{"video": frames, "sample_fps": 4.0, **options}], path_file)
        (item,) = model.read(ids.numpy())
        assert item.shape.grid[3] / 10**12 == pytest.approx(2 / (taken / 12 * 4.0))

    def assert_positions(self, reference, model, ids, inputs):
        items = model.read(ids.numpy())
        assert plain_ids(ids.numpy(), items).tolist() == inputs["input_ids"][0].tolist()
        mask = inputs.get("feature_attention_mask")
        expected, delta = reference.model.model.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            attention_mask=inputs["attention_mask"],
            audio_seqlens=None if mask is None else mask.sum(-1),
            second_per_grids=inputs.get("video_second_per_grid"),
        )
        found = model.positions(len(ids), items)
        assert found.prompt.tolist() == expected[:, 0].tolist()
        assert found.delta == delta.item()

    def test_encoded_media_give_the_same_logits(self, model, tokenizer, path_file):
        """Encoded media give the same logits as the decoded media."""
        samples = tone(0.6)
        decoded = [{"image": noise(40, 50)}, {"audio": samples}, {"text": "?"}]
        audio = encode_audio(samples, 16_000, "WAV", "FLOAT")
        encoded = [{"image": Image.fromarray(noise(40, 50))}, {"audio": audio}, {"text": "?"}]
        first, second = (model.logits(tokenizer.tokenize(items, path_file)) for items in (decoded, encoded))
        assert torch.equal(first, second)


FILMS = {
    "one second": (8, 8, 1.0),
    "several chunks": (40, 8, 4.9),
    "more images than audio": (40, 8, 1.3),
    "more audio than images": (8, 8, 4.4),
    "a short clip": (12, 8, 0.04),
}
"""Number of frames, frames per second, and length of the audio in seconds."""


@functools.cache
def film(frames: int, rate: int, seconds: float, width: int = 112, height: int = 84, *, num_tracks: int = 1) -> bytes:
    """Encode a film with audio without losses. All its audio tracks are the same."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        images = output.add_stream("ffv1", rate=rate)
        clips = [output.add_stream("pcm_f32le", rate=16_000, layout="mono") for _ in range(num_tracks)]
        images.width, images.height, images.pix_fmt = width, height, "bgr0"
        for pixels in clip(frames, height, width):
            output.mux(images.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(images.encode())
        samples = av.AudioFrame.from_ndarray(tone(seconds)[None], format="flt", layout="mono")
        samples.sample_rate = 16_000
        for audio in clips:
            output.mux([*audio.encode(samples), *audio.encode()])
    return file.getvalue()


class TestFilms:
    """Videos whose audio is part of the item (`use_audio_in_video`)."""

    contract: ClassVar = TestQwen25Omni

    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("films")
        cls.contract.write_checkpoint(path)
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, path):
        return cls.contract.make_reference(path)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, path):
        return load_model(path, device="cpu", dtype="float32")

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, path, tmp_path_factory):
        path_file = tmp_path_factory.mktemp("first") / "shm_name.txt"
        with Tokenizer.from_pretrained(path) as tokenizer:
            tokenizer.tokenize([{"audio": tone(0.4)}], path_file)  # creates the arena
            release(path_file)
            yield tokenizer

    def inputs(self, reference, name, fps, text="Look: {}Which way?"):
        frames, rate, seconds = FILMS[name]
        video = reference.processor.video_processor
        metadata = VideoMetadata(total_num_frames=frames, fps=float(rate))
        indices = video.sample_frames(metadata, fps=fps or 2.0).tolist()
        return reference.processor(
            text=[text.format(reference.markers["video"])],
            videos=[clip(frames, 84, 112)[indices]],
            audio=[tone(seconds)],
            audio_from_video_indices=[0],
            load_audio_from_video=True,
            return_tensors="pt",
            videos_kwargs={"do_sample_frames": False} | ({} if fps is None else {"fps": fps}),
        )

    def prompt(self, name, fps=None):
        options = {"use_audio_in_video": True} | ({} if fps is None else {"fps": fps})
        return [{"text": "Look: "}, {"video": film(*FILMS[name]), **options}, {"text": "Which way?"}]

    @pytest.mark.parametrize("fps", [None, 0.7, 1.0, 3.0, 6.0])
    @pytest.mark.parametrize("name", FILMS)
    def test_ids_and_positions_equal_the_references(self, name, fps, reference, model, tokenizer, path_file):
        self.assert_positions(name, fps, reference, model, tokenizer, path_file)

    def assert_positions(self, name, fps, reference, model, tokenizer, path_file):
        inputs = self.inputs(reference, name, fps)
        ids = tokenizer.tokenize(self.prompt(name, fps), path_file).numpy()
        (item,) = items = model.read(ids)
        assert plain_ids(ids, items).tolist() == inputs["input_ids"][0].tolist()
        expected, delta = reference.model.model.get_rope_index(
            inputs["input_ids"],
            None,
            inputs["video_grid_thw"],
            attention_mask=inputs["attention_mask"],
            use_audio_in_video=True,
            audio_seqlens=inputs["feature_attention_mask"].sum(-1),
            second_per_grids=inputs["video_second_per_grid"],
        )
        found = model.positions(len(ids), items)
        assert found.prompt.tolist() == expected[:, 0].tolist()
        assert found.delta == delta.item()
        assert item.shape.grid[4] == inputs["feature_attention_mask"].sum()

    @pytest.mark.parametrize("name", FILMS)
    def test_logits_equal_the_references(self, name, reference, model, tokenizer, path_file):
        inputs = self.inputs(reference, name, None)
        with torch.inference_mode():
            expected = reference.model(**inputs, use_audio_in_video=True).logits[0]
        found = model.logits(tokenizer.tokenize(self.prompt(name), path_file))
        assert (found - expected).abs().max() <= self.contract.tolerance
        silent = [{"text": "Look: "}, {"video": film(*FILMS[name])}, {"text": "Which way?"}]
        without = model.logits(tokenizer.tokenize(silent, path_file))
        assert len(without) < len(found)
        assert (without[-1] - found[-1]).abs().max() > 100 * self.contract.tolerance

    def test_films_beside_other_media_in_a_batch_have_the_same_logits(self, model, tokenizer, path_file):
        alone = [self.prompt("several chunks"), self.prompt("one second"), [{"audio": tone(0.4)}, {"text": "?"}]]
        mixed = [*alone[0], {"image": noise(61, 83)}, *alone[1], {"audio": tone(0.7)}, {"text": "and?"}]
        prompts = [tokenizer.tokenize(items, path_file) for items in (*alone, mixed)]
        together = packed_logits(model, prompts)
        for ids, found in zip(prompts, together, strict=True):
            assert (model.logits(ids) - found).abs().max() <= self.contract.tolerance
        ids = prompts[-1].numpy()
        kinds = [item.shape.kind for item in model.read(ids)]
        assert kinds == ["video", "image", "video", "audio"]
        positions = model.positions(len(ids), model.read(ids)).prompt
        assert (positions[:, -1] > positions[:, :-6].max()).all()

    def test_the_engine_answers_as_the_reference(self, reference, model, tokenizer, path_file):
        inputs = self.inputs(reference, "several chunks", None)
        expected = reference.model.generate(
            **inputs, use_audio_in_video=True, max_new_tokens=12, do_sample=False, pad_token_id=0
        )[0, inputs["input_ids"].shape[1] :].tolist()
        prompts = [tokenizer.tokenize(self.prompt(name), path_file) for name in ("several chunks", "one second")]
        for chunk in (2048, 64):
            engine = Engine(model, EngineConfig(max_num_batched_tokens=chunk, kv_cache_bytes=64 * 2**20))
            outputs, errors = run(engine, prompts, max_tokens=12)
            assert not errors
            assert outputs[0] == expected

    def test_words_replace_no_token_of_the_audio(self, model, tokenizer, path_file):
        """With one token per image, the second token of the item belongs to the audio."""
        data = film(2, 1, 4.0, 28, 28)
        items = [{"video": data, "use_audio_in_video": True, "max_pixels": 784, "min_pixels": 784, "fps": 0.5}]
        ids = tokenizer.tokenize(items, path_file).numpy()
        (item,) = model.read(ids)
        assert np.count_nonzero(plain_ids(ids, [item]) == item.shape.second_token) == item.shape.num_features - 1

    def test_a_silent_film_is_a_video(self, model, tokenizer, path_file):
        data = encode_video(moving_frames(12))
        ids = [tokenizer.tokenize([{"video": data, **more}], path_file) for more in ({"use_audio_in_video": True}, {})]
        plain = [plain_ids(one.numpy(), model.read(one.numpy())).tolist() for one in ids]
        assert plain[0] == plain[1]

    def test_a_film_is_not_packed(self, model, tokenizer, path_file):
        ids = tokenizer.tokenize([{"video": film(*FILMS["one second"]), "use_audio_in_video": True}], path_file)
        with pytest.raises(InputError, match="a sample has a video with its audio, which cannot be packed"):
            collate([Unpacked.of(model, ids)], model.processor, 0, "right", None, 4096)

    def test_audio_above_the_window_is_refused(self, tokenizer, path_file):
        items = [{"video": film(8, 8, WINDOW_S + 1.0), "use_audio_in_video": True}]
        with pytest.raises(LimitExceeded, match=r"the audio of the video: the audio clip lasts 6\.0 s; .* is 5 s"):
            tokenizer.tokenize(items, path_file)
        tokenizer.tokenize([{"video": items[0]["video"]}], path_file)

    def test_audio_that_is_left_out_is_logged_once(self, path, path_file, caplog):
        with Tokenizer.from_pretrained(path) as tokenizer:
            for _ in range(2):
                tokenizer.tokenize([{"video": encode_video(moving_frames(4))}], path_file)
                tokenizer.tokenize([{"video": film(*FILMS["one second"])}], path_file)
        assert [record.getMessage() for record in caplog.records] == [
            "a video has audio, which is left out; set use_audio_in_video to include it"
        ]

    def test_a_second_audio_track_that_is_left_out_is_logged_once(self, path, path_file, caplog):
        with Tokenizer.from_pretrained(path) as tokenizer:
            for num_tracks in (1, 2, 2):
                data = film(*FILMS["one second"], num_tracks=num_tracks)
                tokenizer.tokenize([{"video": data, "use_audio_in_video": True}], path_file)
        assert [record.getMessage() for record in caplog.records] == [
            (
                "a video has several audio tracks, of which only the one that players choose is used; send another "
                "track as an audio item"
            )
        ]


ITEMS = [{"image": noise(61, 83)}, {"text": "and"}, {"audio": tone(0.4)}, {"text": "?"}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    path = tmp_path_factory.mktemp("thinker")
    write_checkpoint(path)
    return path


def logits(path, path_file):
    model = load_model(path, device="cpu", dtype="float32")
    with Tokenizer.from_pretrained(path) as tokenizer:
        return model.logits(tokenizer.tokenize(ITEMS, path_file)), model.spec


def whole(thinker, out):
    """Write a checkpoint of the whole model: the thinker, and weights of a talker, which mindie_mm does not support."""
    for file in thinker.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = Qwen2_5OmniConfig(thinker_config=json.loads((thinker / "config.json").read_text())).to_dict()
    (out / "config.json").write_text(json.dumps({**config, "model_type": "qwen2_5_omni"}))
    weights = {f"thinker.{name}": weight for name, weight in load_file(thinker / "model.safetensors").items()}
    more = {"talker.model.norm.weight": torch.ones(3), "token2wav.code2wav_dit_model.x": torch.ones(3)}
    save_file(weights | more, out / "model.safetensors", {"format": "pt"})


def test_the_thinker_of_a_whole_checkpoint_is_served(thinker, tmp_path, path_file):
    whole(thinker, tmp_path)
    assert family_of(Checkpoint.open(tmp_path)) is family_of(Checkpoint.open(thinker))
    (expected, spec), (found, whole_spec) = logits(thinker, path_file), logits(tmp_path, path_file)
    assert torch.equal(expected, found)
    assert whole_spec.eos_token_ids == spec.eos_token_ids


def test_a_joint_preprocessor_config_is_served(thinker, tmp_path, path_file):
    """Some checkpoints have a single preprocessor_config.json with the settings for images and audio."""
    expected, _ = logits(thinker, path_file)
    for file in thinker.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    joint = json.loads((thinker / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").unlink()
    size = joint["image_processor"].pop("size")
    pixels = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    settings = {**joint["image_processor"], **joint["feature_extractor"], **pixels}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert torch.equal(expected, logits(tmp_path, path_file)[0])


def test_a_missing_weight_of_the_thinker_is_refused(thinker, tmp_path):
    whole(thinker, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: w for n, w in weights.items() if "proj.bias" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match="lacks"):
        load_model(tmp_path, device="cpu", dtype="float32")


def test_videos_have_the_references_size_if_the_checkpoint_states_none(tmp_path, path_file):
    write_checkpoint(tmp_path, Qwen2_5OmniProcessor)
    reference = make_reference(tmp_path, Qwen2_5OmniProcessor)
    items = [{"video": clip(2, 100, 120)}, {"text": "?"}]
    with Tokenizer.from_pretrained(tmp_path) as tokenizer:
        ids = tokenizer.tokenize(items, path_file)
    assert len(ids) == reference.inputs(items)["input_ids"].shape[1] > 128


@pytest.fixture
def path_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("request") / "shm_name.txt"
    yield file
    release(file)
