"""Tests for MindIE's wire format for Qwen2-VL. An independent reader and our model read it."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mindie_mm import MindIETokenizer
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    CorruptReference,
    FeatureCountMismatch,
    InputError,
    LimitExceeded,
    MediaError,
    SegmentMissing,
    SharedMemoryError,
)
from mindie_mm.inputs import Embeddings
from mindie_mm.models import load_model
from mindie_mm.models.qwen2_vl import Qwen2VLProcessor
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import packed_logits
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import Arena, release, request_directory
from mindie_mm.shm.mindie import (
    create_shm,
    encode_shape_to_int64,
    encode_shm_name_to_int64,
    get_data_from_shm,
)
from mindie_mm.tokenize import Tokenizer
from tests.media_samples import decode_all, encode_video, encoded, moving_frames, photograph
from tests.models.contract import run
from tests.transformers_reference import (
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    VideoMetadata,
)
from tests.transformers_reference import Qwen2VLProcessor as ReferenceProcessor

SHM = Path("/dev/shm")
IMAGE = np.asarray(photograph("chelsea.png", (150, 120)))
OTHER = np.asarray(photograph("coffee.png", (99, 200)))
CLIP = moving_frames(4)
PROMPTS = {
    "text": [{"text": "What is in the image? A square, perhaps."}],
    "an image": [{"text": "Look: "}, {"image": IMAGE}, {"text": "What is it?"}],
    "a video": [{"video": CLIP}, {"text": "Which way?"}],
    "mixed": [{"image": IMAGE}, {"video": CLIP}, {"text": "then"}, {"image": OTHER}, {"text": "?"}],
}


@pytest.fixture(scope="module")
def model(random_checkpoint, device):
    return load_model(random_checkpoint, device=device, dtype="float32")


@pytest.fixture
def native(random_checkpoint):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield tokenizer


@pytest.fixture
def mindie(random_checkpoint):
    with Tokenizer.from_pretrained(random_checkpoint, wire="mindie") as tokenizer:
        yield tokenizer


def segments():
    return {path.name for path in SHM.glob("psm_*")}


# This reader of MindIE's wire format is independent of our code. It was written from facts about the format.

CHARSET = "0123456789abcdefpsmnwABCDEF"
BITS = {1: (57,), 2: (29, 28), 3: (19, 19, 19), 4: (18, 3, 18, 18), 5: (13, 13, 3, 14, 14)}


def their_name(word):
    value = -word
    indices = [value >> (53 - 5 * i) & 31 for i in range(value >> 58 & 31)]
    assert sum(indices) % 16 & 7 == value & 7
    return "psm_" + "".join(CHARSET[index] for index in indices)


def their_shape(word):
    value = -word
    assert (value >> 3).bit_count() % 3 == value & 7
    shape, place = [], 60
    for bits in BITS[value >> 60]:
        place -= bits
        shape.append(value >> place & ((1 << bits) - 1))
    return shape


def their_data(name_word, shape_word, dtype):
    """Return the array in a segment. The segment must have exactly the size of the array."""
    data = (SHM / their_name(name_word)).read_bytes()
    assert len(data) == np.prod(their_shape(shape_word)) * np.dtype(dtype).itemsize
    return np.frombuffer(data, dtype).reshape(their_shape(shape_word))


def their_media(ids, start_token):
    """Yield the (kind, planes, grid, seconds) of each item. The words follow the start token."""
    for begin in np.flatnonzero(ids == start_token):
        name, shape, grid, fourth, fifth, *_ = ids[begin + 1 :].tolist()
        planes = their_data(name, shape, np.uint8)
        seconds = their_data(fourth, fifth, np.float32) if fourth < 0 else None
        yield ("video" if fourth < 0 else "image"), planes, their_shape(grid), seconds


class Reference:
    """Processors of transformers for a checkpoint."""

    def __init__(self, path):
        self.image, self.video = (
            Qwen2VLImageProcessor.from_pretrained(path),
            Qwen2VLVideoProcessor.from_pretrained(path),
        )
        self.text = AutoTokenizer.from_pretrained(path)
        self.joint = ReferenceProcessor(self.image, self.text, self.video)

    def ids(self, prompt, images, videos):
        """Return the ids, int64 [T], with one placeholder per feature."""
        images = [torch.tensor(image).permute(2, 0, 1) for image in images] or None
        videos = [torch.tensor(video).permute(0, 3, 1, 2) for video in videos] or None
        return self.joint(text=[prompt], images=images, videos=videos, return_tensors="np")["input_ids"][0]

    def patches(self, kind, pixels):
        """Return the patches of an image or video as uint8, the normalized patches, and the grid."""
        if kind == "image":
            process, given, name = self.image, {"images": [torch.tensor(pixels).permute(2, 0, 1)]}, "pixel_values"
        else:
            given = {"videos": [torch.tensor(pixels).permute(0, 3, 1, 2)], "cap_pixels_per_frame": False}
            process, name = self.video, "pixel_values_videos"
        raw = process(**given, do_rescale=False, do_normalize=False, return_tensors="pt")
        normalised = process(**given, return_tensors="pt")[name]
        (grid,) = raw[f"{kind}_grid_thw"].tolist()
        assert torch.equal(raw[name], raw[name].to(torch.uint8).to(raw[name].dtype))
        return raw[name].to(torch.uint8).numpy(), normalised, grid


@pytest.fixture(scope="module")
def reference(random_checkpoint):
    return Reference(random_checkpoint)


@pytest.fixture(scope="module")
def settings(random_checkpoint):
    return Qwen2VLProcessor(Checkpoint.open(random_checkpoint))


def test_a_mindie_reader_reads_the_ids_and_patches_of_transformers(mindie, reference, settings, path_file):
    """Token ids, grids and patches equal those of transformers, bit for bit. A video has one second per patch."""
    ids = mindie.tokenize(PROMPTS["mixed"], path_file).numpy()
    start, pad, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    video = f"{start}<|video_pad|>{end}"
    expected = reference.ids(f"{start}{pad}{end}{video}then{start}{pad}{end}?", [IMAGE, OTHER], [CLIP])
    assert ids.dtype == np.int64
    assert np.array_equal(np.where(ids < 0, expected, ids), expected)
    token = reference.text.convert_tokens_to_ids
    found = list(their_media(ids, token(start)))
    assert [kind for kind, *_ in found] == ["image", "video", "image"]
    for (kind, planes, grid, seconds), pixels in zip(found, (IMAGE, CLIP, OTHER), strict=True):
        raw, normalised, expected_grid = reference.patches(kind, pixels)
        assert planes.dtype == np.uint8
        assert grid == expected_grid
        assert np.array_equal(planes, raw)
        ours = {"image": settings.image, "video": settings.video}[kind].normalize_planes(torch.tensor(planes))
        assert torch.equal(ours, normalised)
        assert (seconds is None) == (kind == "image")
        if seconds is not None:
            assert seconds.tolist() == [[1.0]]  # two frames per patch at MindIE's 2 frames per second
    words = np.flatnonzero(ids < 0)
    begins = np.flatnonzero(ids == token(start))
    slots = [*(begins[0] + i for i in (1, 2, 3)), *(begins[1] + i for i in (1, 2, 3, 4, 5)), *(begins[2] + i for i in (1, 2, 3))]  # fmt: skip # noqa: E501
    assert words.tolist() == slots
    assert path_file.read_text().splitlines() == [
        their_name(ids[slot]) for slot in (words[0], words[3], words[6], words[8])
    ]


def test_an_image_has_words_for_name_shape_and_grid_only(mindie, path_file):
    ids = mindie.tokenize(PROMPTS["an image"], path_file)
    name, shape, grid = ids[ids < 0]
    data = get_data_from_shm(name, shape, np.uint8)
    assert data.shape == (int(np.prod(their_shape(grid.item()))), 1176)
    assert (SHM / their_name(name.item())).stat().st_size == data.numel()
    assert (SHM / their_name(name.item())).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("fps", "asked", "seconds"), [(10, {}, 1.0), (10, {"fps": 5.0}, 0.4), (8, {"num_frames": 4}, 1.25)]
)
def test_seconds_per_grid_follow_the_sampled_frames(mindie, reference, path_file, fps, asked, seconds):
    video = encode_video(moving_frames(20), fps)
    ids = mindie.tokenize([{"video": video, **asked}], path_file).numpy()
    ((_, planes, grid, found),) = their_media(ids, reference.text.convert_tokens_to_ids("<|vision_start|>"))
    assert found.dtype == np.float32
    assert found.shape == (1, 1)
    assert found[0, 0] == np.float32(seconds)
    metadata = VideoMetadata(total_num_frames=20, fps=float(fps))
    taken = reference.video.sample_frames(metadata, **(asked or {"fps": 2.0}))
    metadata.frames_indices = taken.tolist()
    assert found[0, 0] == np.float32(2 / metadata.sampled_fps)
    pixels = decode_all(video)[taken]
    raw, _, expected_grid = reference.patches("video", pixels)
    assert grid == expected_grid
    assert np.array_equal(planes, raw)


@pytest.mark.parametrize(("rate", "seconds"), [(None, 1.0), (0.5, 4.0), (8.0, 0.25)])
def test_seconds_per_grid_follow_the_rate_of_given_frames(mindie, reference, path_file, rate, seconds):
    ids = mindie.tokenize([{"video": CLIP, "sample_fps": rate}], path_file).numpy()
    ((*_, found),) = their_media(ids, reference.text.convert_tokens_to_ids("<|vision_start|>"))
    assert found[0, 0] == np.float32(seconds)


def test_an_odd_number_of_frames_repeats_the_last_frame(mindie, reference, path_file):
    ids = mindie.tokenize([{"video": CLIP[:3]}], path_file).numpy()
    ((_, planes, grid, _),) = their_media(ids, reference.text.convert_tokens_to_ids("<|vision_start|>"))
    raw, _, expected_grid = reference.patches("video", CLIP[:3])
    assert grid == expected_grid
    assert np.array_equal(planes, raw)


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_equal_those_of_the_native_wire(name, model, native, mindie, path_file):
    ours, theirs = (tokenizer.tokenize(PROMPTS[name], path_file) for tokenizer in (native, mindie))
    assert torch.equal(model.logits(ours), model.logits(theirs))
    assert torch.equal(torch.where(ours < 0, 0, ours)[theirs >= 0], theirs[theirs >= 0])


def test_both_wires_share_one_flat_batch(model, native, mindie, path_file):
    ids = [tokenizer.tokenize(items, path_file) for items in PROMPTS.values() for tokenizer in (native, mindie)]
    logits = packed_logits(model, ids)
    for ours, theirs in zip(logits[::2], logits[1::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_ids_of_a_mindie_tokenizer_are_read(model, native, reference, path_file):
    """This test writes words and patches itself, as MindIE does: the words replace the first placeholders."""
    ids = native.tokenize(PROMPTS["an image"], path_file)
    theirs = ids.clone()
    start = int((ids < 0).nonzero()[0])
    raw, _, grid = reference.patches("image", IMAGE)
    segment = create_shm(raw.nbytes, path_file)
    np.ndarray(raw.shape, raw.dtype, segment.buf)[...] = raw
    words = (encode_shm_name_to_int64(segment.name), encode_shape_to_int64(raw.shape), encode_shape_to_int64(grid))
    theirs[start : start + 3] = torch.tensor(words)
    assert torch.equal(model.logits(theirs), model.logits(ids))


def test_the_engine_answers_both_wires_alike(model, native, mindie, path_file):
    engine = Engine(model, EngineConfig(max_num_batched_tokens=32, max_tower_tokens=8))
    ours, theirs = ([t.tokenize(items, path_file) for items in PROMPTS.values()] for t in (native, mindie))
    outputs, errors = run(engine, [*ours, *theirs], max_tokens=8)
    assert not errors
    for i in range(len(PROMPTS)):
        assert outputs[i] == outputs[i + len(PROMPTS)]


def test_features_are_not_cached_for_another_request(model, mindie, path_file):
    """The format has no content digest, so the same words may refer to another image in the next request."""
    engine = Engine(model, EngineConfig())
    ids = mindie.tokenize(PROMPTS["an image"], path_file)
    before, _ = run(engine, [ids, ids], max_tokens=8)
    name, shape, _ = ids[ids < 0].tolist()
    with (SHM / their_name(name)).open("r+b") as file:
        file.write(bytes(np.prod(their_shape(shape))))
    after, _ = run(engine, [ids, ids], max_tokens=8)
    assert engine.stats.encoder_cache_hits == 0
    assert before[0] == before[1]
    assert after[0] == after[1]
    items = [item for _ in range(2) for item in model.read(ids.numpy())]
    assert items[0].digest is None
    assert items[0].ref != items[1].ref
    fresh, _ = run(Engine(model, EngineConfig()), [ids], max_tokens=8)
    assert after[0] == fresh[0]


@pytest.mark.parametrize("moment", ["before it is added", "while it waits"])
@pytest.mark.parametrize("harm", ["removed", "cut short"])
def test_a_lost_segment_fails_its_own_request_alone(model, mindie, path_file, moment, harm):
    good, bad = (mindie.tokenize(PROMPTS[name], path_file) for name in ("mixed", "an image"))
    expected, _ = run(Engine(model, EngineConfig()), [good], max_tokens=8)
    file = SHM / their_name(bad[bad < 0][0].item())
    engine = Engine(model, EngineConfig(encoder_cache_bytes=0))
    params = SamplingParams(temperature=0, max_tokens=8)

    def damage_segment():
        if harm == "removed":
            file.unlink()
        else:
            os.truncate(file, 5000)

    if moment == "before it is added":
        damage_segment()
    news = [engine.add(Add(name, ids.numpy().tobytes(), params)) for name, ids in (("bad", bad), ("good", good))]
    if moment == "while it waits":
        damage_segment()
    while engine.has_work():
        news += engine.step().progress
    news = [progress for progress in news if progress]
    # A segment that is already mapped remains readable when its file is removed.
    lost = moment == "before it is added" or harm == "cut short"
    errors = {progress.request_id: progress.error.name for progress in news if progress.error}
    assert errors == ({"bad": "SegmentMissing"} if lost else {})
    tokens = [token for progress in news if progress.request_id == "good" for token in progress.token_ids]
    assert tokens == expected[0]


def test_a_released_request_is_missing(model, mindie, tmp_path):
    with request_directory(tmp_path) as directory:
        ids = mindie.tokenize(PROMPTS["mixed"], directory.path_file)
        assert len(segments()) >= 4
    with pytest.raises(SegmentMissing, match="there is no segment /dev/shm/psm_"):
        model.logits(ids)


def test_words_that_do_not_belong_to_the_family_are_refused(model, mindie, path_file):
    ids = mindie.tokenize(PROMPTS["an image"], path_file).numpy()
    first = int(np.flatnonzero(ids < 0)[0])
    pad = int(ids[first + 3])

    def changed(slot, word):
        other = ids.copy()
        other[first + slot] = word
        return other

    name, shape, grid = ids[first : first + 3].tolist()
    rows, width = their_shape(shape)
    for slot in range(3):
        for bit in range(63):
            with pytest.raises((CorruptReference, SegmentMissing, LimitExceeded, FeatureCountMismatch)):
                model.read(changed(slot, int(ids[first + slot]) ^ 1 << bit))
    for other in (changed(0, shape), changed(0, grid), changed(1, name), changed(0, -1), changed(0, -2)):
        with pytest.raises((CorruptReference, LimitExceeded)):
            model.read(other)
    with pytest.raises(
        CorruptReference, match=r"an item in MindIE's format has 2 handle words; items of this model have 3 or 5"
    ):
        model.read(changed(2, pad))
    for wrong in ((2 * rows, width // 2), (rows // 2, 2 * width), (rows * width,)):
        with pytest.raises(CorruptReference, match=r"the segment has the shape .*, but the grid of the image needs"):
            model.read(changed(1, encode_shape_to_int64(wrong)))
    with pytest.raises(CorruptReference, match="encodes the name psm_abCD123"):
        get_data_from_shm(encode_shm_name_to_int64("abCD123"), shape, np.uint8)
    with pytest.raises(CorruptReference, match="which is neither a token id nor a name word"):
        model.read(changed(0, encode_shm_name_to_int64("abCD123")))
    shorter = np.delete(ids, first + 5)
    with pytest.raises(FeatureCountMismatch):
        model.read(shorter)


@pytest.mark.parametrize(
    ("kind", "pixels", "features"),
    [("image", np.zeros((28, 56, 3), np.uint8), 2), ("video", np.zeros((2, 56, 56, 3), np.uint8), 4)],
)
def test_an_item_with_fewer_features_than_words_is_refused(random_checkpoint, device, tmp_path, kind, pixels, features):
    path = shutil.copytree(random_checkpoint, tmp_path / "small")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        if (path / name).exists():
            config = json.loads((path / name).read_text())
            for part in (config, config.get("image_processor", {}), config.get("video_processor", {})):
                if "min_pixels" in part or "size" in part:
                    part |= {"min_pixels": 784, "size": {"shortest_edge": 784, "longest_edge": 200_000}}
            (path / name).write_text(json.dumps(config))
    before = segments()
    needed = {"image": 3, "video": 5}[kind]
    with Tokenizer.from_pretrained(path, wire="mindie") as tokenizer:
        with pytest.raises(
            LimitExceeded,
            match=rf"media item 1 \({kind}\): the {kind} has {features} features; MindIE's wire format needs at least",
        ):
            tokenizer.tokenize([{"image": IMAGE}, {kind: pixels}], tmp_path / "shm_name.txt")
        exact = {"image": np.zeros((28, 84, 3), np.uint8), "video": np.zeros((2, 28, 140, 3), np.uint8)}[kind]
        with request_directory(tmp_path / "spool") as directory:
            ids = tokenizer.tokenize([{kind: exact}], directory.path_file)
            assert (ids < 0).sum() == needed == len(ids) - 2
            assert load_model(path, device=device, dtype="float32").logits(ids).isfinite().all()
    assert segments() == before


def test_a_failed_prompt_leaves_no_segments(mindie, tmp_path):
    before, path_file = segments(), tmp_path / "shm_name.txt"
    broken = encoded(photograph("coffee.png", (300, 300)))[:3000]
    with pytest.raises(MediaError, match=r"media item 2 \(image\): the JPEG image of 300x300 pixels is broken"):
        mindie.tokenize([{"image": IMAGE}, {"video": CLIP}, {"image": broken}], path_file)
    assert segments() == before
    assert path_file.read_text().count("\n") == 4
    assert release(path_file) == 0
    with pytest.raises(SharedMemoryError, match=f"path file {tmp_path / 'gone' / 'x'} cannot be written"):
        mindie.tokenize([{"image": IMAGE}], tmp_path / "gone" / "x")
    with pytest.raises(InputError, match="shm_name_save_path is None"):
        mindie.tokenize([{"image": IMAGE}])
    assert segments() == before


def test_an_unknown_wire_is_refused(random_checkpoint):
    with pytest.raises(InputError, match="wire='psm' must be one of native, mindie"):
        Tokenizer.from_pretrained(random_checkpoint, wire="psm")
    with Arena.create(1 << 16) as arena, pytest.raises(InputError, match="arena is given"):
        Tokenizer.from_pretrained(random_checkpoint, wire="mindie", arena=arena)


def test_a_mindie_tokenizer_has_the_interface_of_mindies_router(random_checkpoint, mindie, tmp_path):
    """`tokenize` makes one user turn, and `make_context` a conversation. Unknown arguments have no effect."""
    (tmp_path / "image").mkdir()
    image, path_file = tmp_path / "image" / "1.png", tmp_path / "shm_name.txt"
    photograph("chelsea.png", (150, 120)).save(image)
    inputs = [{"image": str(image)}, {"text": "What is it?"}]
    history = [{"role": "user", "content": "Hello"}, {"role": "user", "content": inputs}]
    with MindIETokenizer.from_pretrained(random_checkpoint) as tokenizer:
        assert tokenizer.is_multimodal is True  # MindIE's routers read it
        for found, expected in (
            (tokenizer.tokenize(inputs), mindie.tokenize_chat([{"role": "user", "content": inputs}], path_file)),
            (
                tokenizer.tokenize(inputs, shm_name_save_path=str(path_file), rank=1),
                mindie.tokenize_chat([{"role": "user", "content": inputs}], path_file),
            ),
            (
                tokenizer.make_context(0, history, add_generation_prompt=False, system="no effect"),
                mindie.tokenize_chat(history, path_file, add_generation_prompt=False),
            ),
            (
                tokenizer.make_context(0, history[:1], chat_template_kwargs={"unused": 1}),
                mindie.tokenize_chat(history[:1], path_file),
            ),
        ):
            assert torch.equal(found.clamp(min=-1), expected.clamp(min=-1))
        for wrong in ("text", None, [], [{"picture": "x"}]):
            with pytest.raises(InputError, match="inputs"):
                tokenizer.tokenize(wrong)
        assert path_file.read_text().count("psm_") == 6
        assert release(path_file) == 6


def test_embeddings_have_no_form_in_mindies_format(mindie, path_file):
    with pytest.raises(InputError, match=r"media item 0 \(image\): MindIE's workers cannot read this image, because"):
        mindie.tokenize([{"image": Embeddings(np.zeros((4, 64), np.float32), (1, 4, 4))}], path_file)
    assert not path_file.exists() or not path_file.read_text()
