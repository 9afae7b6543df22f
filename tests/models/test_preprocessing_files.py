"""Tests for the files that contain preprocessing settings, and settings that do not fit the model.

The settings are read from the same files as in transformers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import family_named, family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint

PUBLISHED = Path(__file__).parents[1] / "published"
IMAGE, VIDEO, JOINT = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes a published config.json and the given further files."""

    def write(name: str, **files: Any) -> Path:
        shutil.copyfile(PUBLISHED / name / "config.json", tmp_path / "config.json")
        for file, content in files.items():
            (tmp_path / f"{file}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def published(name: str, file: str) -> Any:
    return json.loads((PUBLISHED / name / file).read_text())


def processor(path: Path) -> Any:
    checkpoint = Checkpoint.open(path)
    return family_of(checkpoint).processor(checkpoint)


def refused(path: Path, message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        processor(path)


def test_the_joint_file_alone_is_enough(folder):
    joint = published("qwen3_vl_8b_lora", JOINT)
    found = processor(folder("qwen3_vl_cosmos2", processor_config=joint))
    assert (found.image.min_pixels, found.image.max_pixels) == (65536, 16777216)
    assert (found.video.min_pixels, found.video.max_pixels) == (4096, 25165824)


def test_the_joint_file_takes_precedence(folder):
    """An empty section of the joint file also takes precedence. It means the defaults of the class."""
    joint = {"image_processor": {"max_pixels": 1_000_000}, "video_processor": {}}
    others = {"preprocessor_config": {"max_pixels": 5000}, "video_preprocessor_config": {"max_pixels": 6000}}
    found = processor(folder("qwen2_vl_ain", processor_config=joint, **others))
    assert (found.image.max_pixels, found.video.max_pixels) == (1_000_000, 28 * 28 * 768)
    found = processor(folder("qwen2_vl_ain", processor_config={"image_processor": None}, **others))
    assert (found.image.max_pixels, found.video.max_pixels) == (5000, 6000)


def test_image_settings_of_another_class_are_refused_for_videos(folder):
    """By the image settings, transformers would select a video class that samples and resizes differently."""
    path = folder("qwen3_vl_cosmos2", preprocessor_config=published("qwen3_vl_cosmos2", IMAGE))
    refused(path, r"'Qwen2VLVideoProcessor' in preprocessor_config\.json.*video_preprocessor_config\.json")
    found = processor(folder("qwen2_vl_olmocr", preprocessor_config=published("qwen2_vl_olmocr", IMAGE)))
    assert found.video.max_pixels == found.image.max_pixels == 12845056


@pytest.mark.parametrize("name", ["preprocessor_config", "video_preprocessor_config"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 14}, "patch_size is 14, but the tower in config.json takes 16"),
        ({"merge_size": 4}, "merge_size is 4, but the tower in config.json takes 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1, but the tower in config.json takes 2"),
    ],
    ids=str,
)
def test_patches_that_do_not_fit_the_tower_are_refused(folder, name, change, message):
    files = {"preprocessor_config": published("qwen3_vl_cosmos2", IMAGE)}
    files["video_preprocessor_config"] = published("qwen3_vl_cosmos2", VIDEO)
    refused(folder("qwen3_vl_cosmos2", **files | {name: files[name] | change}), message)


def test_settings_of_another_model_are_refused(folder):
    """Qwen2-VL's settings are refused in a Qwen3-VL checkpoint, although both models use the same image class."""
    other = {"preprocessor_config": published("qwen2_vl_ain", IMAGE)}
    video = {"video_preprocessor_config": published("qwen3_vl_cosmos2", VIDEO)}
    refused(folder("qwen3_vl_cosmos2", **other, **video), "patch_size is 14, but the tower in config.json takes 16")
    refused(folder("qwen2_vl_ain", preprocessor_config=published("llava_next", IMAGE)), "'LlavaNextImageProcessorFast'")
    refused(folder("llava_next", preprocessor_config=published("qwen2_vl_ain", IMAGE)), "'Qwen2VLImageProcessor'")


def test_size_limits_under_other_names_are_refused(folder):
    path = folder("qwen2_vl_ain", preprocessor_config={"size": {"max_pixels": 5000, "min_pixels": 4000}})
    refused(path, "must have shortest_edge and longest_edge")


def test_an_earlier_name_of_an_image_processor_is_accepted(folder):
    settings = published("qwen25_vl_7b", IMAGE) | {"image_processor_type": "Qwen2_5_VLImageProcessor"}
    assert processor(folder("qwen25_vl_7b", preprocessor_config=settings)).image.max_pixels == 12845056


@pytest.mark.parametrize("stated", [{"feature_size": 64}, {}])
def test_spectrograms_that_do_not_fit_the_tower_are_refused(stated, tmp_path):
    config = {"model_type": "qwen2_audio", "audio_config": {"num_mel_bins": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / IMAGE).write_text(json.dumps({"feature_extractor_type": "WhisperFeatureExtractor", **stated}))
    with pytest.raises(UnsupportedCheckpoint, match=r"feature_size is (64|80); only 128 is supported"):
        family_named("qwen2_audio").processor(Checkpoint.open(tmp_path))


def test_the_name_of_a_feature_extractor_is_accepted(folder):
    """Files that are older than transformers' image processors give the class of a feature extractor."""
    settings = published("llava15", JOINT)["image_processor"] | {"image_processor_type": None}
    old = settings | {"feature_extractor_type": "CLIPFeatureExtractor"}
    processor(folder("llava15", preprocessor_config=old))
    refused(
        folder("llava15", preprocessor_config=old | {"feature_extractor_type": "ViTFeatureExtractor"}),
        "image_processor_type is 'ViTImageProcessor'",
    )


@pytest.mark.parametrize("missing", ["candidate_resolutions", "patch_size", "downsample_ratio"])
def test_a_file_without_a_needed_key_is_refused(missing, tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "deepseek_vl2" / "plain"
    for file in golden.glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    settings = json.loads((tmp_path / JOINT).read_text())
    del settings[missing]
    (tmp_path / JOINT).write_text(json.dumps(settings))
    refused(tmp_path, rf"its processor_config\.json has no {missing}")
