import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLConfig

from mindie_mm.errors import InputError, LimitExceeded, MediaError, UnsupportedCheckpoint
from mindie_mm.inputs import Media, MediaOptions
from mindie_mm.models._mrope import mrope_positions
from mindie_mm.models._qwen_pixels import sample_frames
from mindie_mm.models.hunyuan_vl import HunYuanVLProcessor
from mindie_mm.models.qwen2_vl import Qwen2VLProcessor
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.pixels import normalize_patches, repeat_frames
from tests import transformers_reference as reference
from tests.media_samples import (
    PHOTOGRAPHS,
    decode_all,
    encode_video,
    encoded,
    jpeg_variants,
    moving_frames,
    photograph,
)


def make_processor(folder: Path, **files: dict) -> Qwen2VLProcessor:
    """Write the given JSON files into a directory and return the processor for it.

    An empty settings file means defaults.
    """
    folder.mkdir(exist_ok=True)
    for name, content in {"config": {"model_type": "qwen2_vl"}, "preprocessor_config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Qwen2VLProcessor(Checkpoint.open(folder))


@pytest.fixture
def processor(tmp_path) -> Qwen2VLProcessor:
    """Return a processor with the family's defaults."""
    return make_processor(tmp_path / "checkpoint")


def preprocess(processor, kind, data, **options):
    """Return the plan and the arrays that `write` fills."""
    plan, write = processor.plan(Media(kind, data, MediaOptions(**options)), data, {kind: 1})
    arrays = {name: np.full(spec.shape, 77, spec.dtype) for name, spec in plan.specs.items()}
    write(arrays)
    return plan, {name: torch.from_numpy(array) for name, array in arrays.items()}


def assert_image_equal(processor, data, image: Image.Image, **kwargs):
    """Assert that grid and normalized pixels equal those of transformers' torchvision backend, bit for bit."""
    expected = reference.Qwen2VLImageProcessor(**kwargs)(images=[image], return_tensors="pt")
    plan, arrays = preprocess(processor, "image", data)
    settings = processor.image
    assert list(plan.grid) == expected["image_grid_thw"][0].tolist()
    assert plan.num_features == expected["image_grid_thw"].prod() // 4
    assert list(plan.specs) == ["pixel_values"]
    normalized = normalize_patches(arrays["pixel_values"], settings.mean, settings.std, settings.rescale_factor)
    assert torch.equal(repeat_frames(normalized, settings.temporal_patch_size), expected["pixel_values"])


SIZES = [(640, 480), (720, 1420), (28, 28), (56, 84), (57, 83), (1, 1), (30, 900), (1600, 31), (1000, 1003)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_images_of_many_sizes_equal_the_references(processor, size):
    image = photograph("coffee.png", size)
    assert_image_equal(processor, encoded(image, "PNG"), image)


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_photographs_equal_the_references(processor, name):
    image = photograph(name)
    assert_image_equal(processor, encoded(image, "PNG"), image)
    assert_image_equal(processor, np.asarray(image), image)


@pytest.mark.parametrize(("name", "data"), jpeg_variants()[:14], ids=lambda v: v if isinstance(v, str) else "")
def test_jpegs_equal_the_references(processor, name, data, tmp_path):
    file = tmp_path / f"{name.replace(' ', '_')}.jpg"
    file.write_bytes(data)
    assert_image_equal(processor, data, reference.load_image(str(file)))


@pytest.mark.parametrize("max_pixels", [28 * 28 * 4, 28 * 28 * 300, 12845056])
def test_images_under_pixel_limits_equal_the_references(tmp_path, max_pixels):
    limits = {"min_pixels": 28 * 28 * 4, "max_pixels": max_pixels}
    image = photograph("astronaut.png", (700, 500))
    for number, config in enumerate((limits, {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": max_pixels}})):
        processor = make_processor(tmp_path / f"{number}", preprocessor_config=config)
        assert_image_equal(processor, encoded(image, "PNG"), image, **limits)


def test_two_portraits_have_the_known_grids_and_lengths(tmp_path):
    """The images have 720x1420 pixels, and the limit is that of the published checkpoints."""
    processor = make_processor(tmp_path / "checkpoint", preprocessor_config={"max_pixels": 12845056})
    plans = [preprocess(processor, "image", encoded(photograph(name, (720, 1420)))) for name in PHOTOGRAPHS[:2]]
    assert [plan.grid for plan, _ in plans] == [(1, 102, 52)] * 2
    lengths = torch.tensor([0] + [len(arrays["pixel_values"]) for _, arrays in plans])
    assert lengths.cumsum(0).tolist() == [0, 5304, 10608]
    assert sum(plan.num_features for plan, _ in plans) == 2652


def assert_video_equal(processor, data, frames, video_fps, **options):
    """Assert that grid and normalized pixels of the sampled frames equal transformers' for the same video."""
    metadata = reference.VideoMetadata(total_num_frames=len(frames), fps=video_fps)
    sampling = options if "num_frames" in options else {"fps": 2.0, **options}
    expected = reference.Qwen2VLVideoProcessor()(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=True,
        cap_pixels_per_frame=False,
        return_tensors="pt",
        **sampling,
    )
    plan, arrays = preprocess(processor, "video", data, **options)
    settings = processor.video
    assert list(plan.grid) == expected["video_grid_thw"][0].tolist()
    assert plan.num_features == expected["video_grid_thw"].prod() // 4
    assert list(plan.specs) == ["pixel_values_videos"]
    normalized = normalize_patches(arrays["pixel_values_videos"], settings.mean, settings.std, settings.rescale_factor)
    assert torch.equal(normalized, expected["pixel_values_videos"])


@pytest.mark.parametrize("num_frames", [2, 3, 5, 24, 61])
def test_videos_of_many_lengths_equal_the_references(processor, num_frames):
    data = encode_video(moving_frames(num_frames), fps=10)
    assert_video_equal(processor, data, decode_all(data), 10.0)


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 5.0},
        {"fps": 0.5},
        {"num_frames": 6},
        {"num_frames": 7},
        {"min_frames": 12},
        {"fps": 10, "max_frames": 9},
    ],
    ids=str,
)
def test_videos_under_sampling_options_equal_the_references(processor, options):
    data = encode_video(moving_frames(30), fps=10)
    assert_video_equal(processor, data, decode_all(data), 10.0, **options)


def test_videos_of_other_sizes_equal_the_references(processor):
    for width, height in ((560, 420), (84, 140), (30, 30)):
        frames = np.stack([np.asarray(photograph("chelsea.png", (width, height)))] * 5)
        data = encode_video(frames, fps=5)
        assert_video_equal(processor, data, decode_all(data), 5.0)


def test_a_single_frame_is_repeated(processor):
    frames = moving_frames(1)
    plan, arrays = preprocess(processor, "video", frames)
    patches = arrays["pixel_values_videos"].view(-1, 2, 14, 14, 3)
    assert plan.grid[0] == 1
    assert torch.equal(patches[:, 0], patches[:, 1])
    encoded_plan, _ = preprocess(processor, "video", encode_video(frames))
    assert encoded_plan.grid[0] == 1


def test_given_frames_are_all_used(processor):
    frames = moving_frames(7)
    plan, arrays = preprocess(processor, "video", frames)
    assert plan.grid[0] == 4
    expected = reference.Qwen2VLVideoProcessor()(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], cap_pixels_per_frame=False, return_tensors="pt"
    )
    normalized = normalize_patches(arrays["pixel_values_videos"], processor.video.mean, processor.video.std)
    assert torch.equal(normalized, expected["pixel_values_videos"])
    with pytest.raises(
        LimitExceeded, match=r"769 frames; the limit is 768\. Ask for fewer with num_frames or max_frames"
    ):
        preprocess(processor, "video", np.broadcast_to(frames[:1], (769, *frames.shape[1:])))
    many = np.broadcast_to(frames[:1, :28, :28], (769, 28, 28, 3))
    plan, _ = processor.plan(Media("video", many, MediaOptions(max_frames=768)), many, {"video": 1})
    assert plan.grid[0] == 384


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 7, 30, 299, 1537])
def test_frame_indices_equal_the_references(processor, total):
    own = reference.Qwen2VLVideoProcessor()
    for rate in (1.0, 23.976, 30.0):
        for fps in (0.3, 2.0, 7.0):
            if total == 1:
                assert sample_frames(1, rate, replace(processor.video, fps=fps)) == [0]
                continue
            metadata = reference.VideoMetadata(total_num_frames=total, fps=rate)
            expected = own.sample_frames(metadata, fps=fps).tolist()
            assert sample_frames(total, rate, replace(processor.video, fps=fps)) == expected


def test_pixels_of_all_frames_can_be_bounded(tmp_path):
    config = {"cap_pixels_per_frame": True, "max_video_tokens": 2000}
    processor = make_processor(tmp_path / "checkpoint", video_preprocessor_config=config)
    frames = np.stack([np.asarray(photograph("chelsea.png", (560, 420)))] * 20)
    expected = reference.Qwen2VLVideoProcessor(**config)(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], return_tensors="pt"
    )
    plan, _ = processor.plan(Media("video", frames), frames, {"video": 1})
    assert plan.num_features == expected["video_grid_thw"].prod() // 4


def test_limit_errors_name_the_value_and_the_limit(processor):
    image, video = encoded(photograph(size=(100, 100))), encode_video(moving_frames(8))
    for kind, data, options, message in (
        ("image", image, {"max_pixels": 2_000_000}, "max_pixels is 2000000; the checkpoint's limit is 1003520"),
        ("video", video, {"num_frames": 769}, "num_frames is 769; the checkpoint's limit is 768"),
        ("image", encoded(photograph(size=(401, 2))), {}, "401x2 pixels; the longer side must be at most 200 times"),
    ):
        with pytest.raises(LimitExceeded, match=message):
            preprocess(processor, kind, data, **options)
    with pytest.raises(InputError, match="num_frames is 20; the video has only 8 frames"):
        preprocess(processor, "video", video, num_frames=20)
    with pytest.raises(MediaError):
        preprocess(processor, "image", b"junk")


def test_low_detail_reduces_the_features(processor):
    plan, _ = preprocess(processor, "image", np.asarray(photograph(size=(1200, 900))), detail="low")
    assert 250 < plan.num_features <= 512 * 512 / 784


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens"), [(0.1, 0.7), (1.2, 3.5), (4.3, 4.3), (0.5, 30), (9.5, 99.9), (150.3, 205), (1, 1280)]
)
@pytest.mark.parametrize("name", ["qwen2_vl", "hunyuan_vl"])
def test_max_tokens_are_the_most_that_the_resize_yields(min_tokens, max_tokens, name, processor):
    """Elongated images may have more tokens than pixels allow, because each side has at least one."""
    own = Qwen2VLProcessor if name == "qwen2_vl" else HunYuanVLProcessor
    processor.__class__ = own
    pixels = [int(tokens * 8**2) for tokens in (min_tokens, max_tokens)]
    processor.image = replace(processor.image, min_pixels=pixels[0], max_pixels=pixels[1], patch_size=4)
    sizes = [(short, long) for short in (1, 2, 5, 7) for long in range(short, 200 * short + 1)]
    sizes += [(short, short * ratio // 4) for short in (12, 50, 400) for ratio in range(4, 801)]
    sizes += [size[::-1] for size in sizes] + [*processor._image_sizes()]
    found = max(map(processor._image_features, sizes))
    assert 0.99 * processor.max_tokens("image") <= found <= processor.max_tokens("image")
    data = processor.worst_case("image")
    planned = processor.plan(Media("image", data), data, {})[0].num_features
    assert 0.95 * found <= planned <= found


def test_max_tokens_of_the_defaults(processor):
    assert processor.max_tokens("image") == 1280
    assert processor.max_tokens("video") == 384 * 768


def test_options_cannot_ask_for_more_than_max_tokens(processor):
    image = np.zeros((10, 1400, 3), np.uint8)
    assert preprocess(processor, "image", image, min_pixels=900_000)[0].num_features <= 1280
    with pytest.raises(LimitExceeded, match=r"with min_pixels 1003520, .*has 1696 tokens.*limit is 1280. Lower"):
        preprocess(processor, "image", image, min_pixels=1_003_520)


def test_plan_settings_differ_only_if_the_arrays_do(processor):
    data = encoded(photograph(size=(640, 480)))
    plans = [
        preprocess(processor, "image", data, **o)[0] for o in ({}, {"max_pixels": 1_000_000}, {"max_pixels": 9000})
    ]
    assert plans[0].settings == plans[1].settings != plans[2].settings


def test_settings_come_from_the_configuration_files(tmp_path):
    joint = {"image_processor": {"max_pixels": 10_000}, "video_processor": {"max_pixels": 20_000, "fps": 1}}
    processor = make_processor(tmp_path / "joint", processor_config=joint, preprocessor_config={"max_pixels": 9})
    assert (processor.image.max_pixels, processor.video.max_pixels, processor.video.fps) == (10_000, 20_000, 1)
    processor = make_processor(tmp_path / "image", preprocessor_config={"max_pixels": 10_000})
    assert (processor.image.max_pixels, processor.video.max_pixels) == (10_000, 10_000)
    with pytest.raises(UnsupportedCheckpoint, match="do_resize is False"):
        make_processor(tmp_path / "refused", preprocessor_config={"do_resize": False})


def test_placeholders_have_the_configured_ids(tmp_path):
    ids = {"image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 3, "vision_end_token_id": 4}
    processor = make_processor(tmp_path / "checkpoint", config={"model_type": "qwen2_vl", **ids})
    image, video = processor.placeholders["image"], processor.placeholders["video"]
    assert (image.before, image.token, image.after) == ((3,), 6, (4,))
    assert (video.before, video.token, video.after) == ((3,), 7, (4,))


def test_a_video_has_the_known_positions():
    """The grid (3, 2, 2) is at the start of the sequence. The expected positions are written out."""
    placed = mrope_positions(15, [(0, 12, (3, 2, 2))])
    positions, delta = placed.prompt, placed.delta
    assert "".join(map(str, positions[0].tolist())) == "000011112222345"
    assert "".join(map(str, positions[1].tolist())) == "001100110011345"
    assert "".join(map(str, positions[2].tolist())) == "010101010101345"
    assert positions.dtype == torch.int64
    assert delta == 6 - 15


def test_text_alone_has_consecutive_positions():
    placed = mrope_positions(5, [])
    positions, delta = placed.prompt, placed.delta
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_positions_equal_transformers_where_both_rules_agree():
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    with torch.device("meta"):
        model = Qwen2VLModel(Qwen2VLConfig())
    grids = {4: (1, 3, 5), 12: None, 40: (2, 4, 2), 60: (3, 3, 6)}
    types = torch.zeros(1, 130, dtype=torch.int32)
    spans, images, videos = [], [], []
    for start, grid in grids.items():
        if grid is None:
            continue
        stop = start + grid[0] * grid[1] * grid[2]
        types[0, start:stop] = 1 if grid[0] == 1 else 2
        (images if grid[0] == 1 else videos).append([grid[0], grid[1] * 2, grid[2] * 2])
        spans.append((start, stop, grid))
    expected, expected_delta = model.get_rope_index(
        torch.zeros(1, 130, dtype=torch.int64), types, torch.tensor(images), torch.tensor(videos)
    )
    placed = mrope_positions(130, spans)
    positions, delta = placed.prompt, placed.delta
    assert torch.equal(positions, expected[:, 0])
    assert delta == expected_delta.item()
