"""Tests for the tokenizer against transformers."""

import base64
import json
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mindie_mm
from mindie_mm.errors import (
    ArenaFull,
    ContextLengthExceeded,
    InputError,
    LimitExceeded,
    MediaError,
    Miscounted,
    TokenOutOfRange,
    UnsupportedCheckpoint,
)
from mindie_mm.inputs import parse_messages, webui
from mindie_mm.media.guard.caps import decoding_to_count
from mindie_mm.media.video.encoded_video import EncodedVideo
from mindie_mm.nn.pixels import normalize_patches, repeat_frames
from mindie_mm.settings.config import MediaCaps
from mindie_mm.shm import Arena, Ref, attach, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_items
from tests import transformers_reference as reference
from tests.media_samples import decode_all, encode_video, encoded, moving_frames, photograph


@pytest.fixture(scope="session")
def processor(checkpoint_path):
    """Return transformers' processor."""
    return reference.Qwen2VLProcessor.from_pretrained(checkpoint_path)


@pytest.fixture
def spool(tmp_path) -> Path:
    """Yield a request directory that contains two images and a video."""
    (tmp_path / "request" / "image").mkdir(parents=True)
    (tmp_path / "request" / "video").mkdir()
    (tmp_path / "request" / "image" / "0.jpg").write_bytes(encoded(photograph("chelsea.png", (150, 120))))
    (tmp_path / "request" / "image" / "1.png").write_bytes(encoded(photograph("coffee.png", (99, 200)), "PNG"))
    (tmp_path / "request" / "video" / "0.mp4").write_bytes(encode_video(moving_frames(20), fps=10))
    yield tmp_path / "request"
    release(tmp_path / "request" / "shm_name.txt")


IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


def expected_inputs(processor, text: str, images=(), videos=()):
    """Return ids, grids and pixels from transformers. Videos are sampled at 2 frames per second."""
    frames = [decode_all(Path(video).read_bytes()) for video in videos]
    return processor(
        text=[text],
        images=[reference.load_image(str(image)) for image in images] or None,
        videos=[torch.from_numpy(f).permute(0, 3, 1, 2) for f in frames] or None,
        return_tensors="pt",
        videos_kwargs={
            "video_metadata": [reference.VideoMetadata(total_num_frames=len(f), fps=10.0) for f in frames],
            "do_sample_frames": True,
            "fps": 2.0,
            "cap_pixels_per_frame": False,
        },
    )


def assert_same(ids: torch.Tensor, expected, processor) -> None:
    """Assert that all ids except handle words are equal, and that the handle words lead to equal grids and pixels."""
    assert ids.dtype == torch.int64
    assert ids.device.type == "cpu"
    plain, words = expected["input_ids"][0], (ids < 0).nonzero().flatten().tolist()
    assert ids.shape == plain.shape
    assert torch.equal(torch.where(ids < 0, plain, ids), plain)
    firsts = words[::2]
    assert [start + 1 for start in firsts] == words[1::2]
    pixels = {"pixel_values": [], "pixel_values_videos": []}
    grids = {"pixel_values": [], "pixel_values_videos": []}
    for start in firsts:
        assert plain[start - 1] == processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
        with attach(Ref.from_words(ids[start].item(), ids[start + 1].item())) as view:
            (name, array), (_, item) = view.items()
            settings = processor.image_processor
            patches = normalize_patches(torch.from_numpy(array.copy()), settings.image_mean, settings.image_std)
            pixels[name].append(repeat_frames(patches, 2) if name == "pixel_values" else patches)
            grids[name].append(torch.from_numpy(item[3:].copy()))
    for name, key in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        if grids[name]:
            assert torch.equal(torch.stack(grids[name]), expected[key])
    for name, found in pixels.items():
        if found:
            assert torch.equal(torch.cat(found), expected[name])


def test_items_are_tokenized_as_in_transformers(tokenizer, processor, spool):
    image, other, video = spool / "image" / "0.jpg", spool / "image" / "1.png", spool / "video" / "0.mp4"
    inputs = [
        {"text": "Look: "},
        {"image": str(image)},
        {"text": " and"},
        {"video": str(video)},
        {"image": other.as_uri()},
        {"text": "\n what is in the image? ünï🙂"},
    ]
    text = f"Look: {IMAGE} and{VIDEO}{IMAGE}\n what is in the image? ünï🙂"
    assert_same(tokenizer.tokenize(inputs), expected_inputs(processor, text, [image, other], [video]), processor)
    assert (spool / "shm_name.txt").read_text().count("\n") == 3


def test_a_chat_is_tokenized_as_in_transformers(tokenizer, processor, spool):
    image, video = spool / "image" / "0.jpg", spool / "video" / "0.mp4"
    content = [
        {"type": "image", "image": str(image)},
        {"type": "text", "text": "What is in the image?"},
        {"type": "video", "video": str(video)},
    ]
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": "  sure? "},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert_same(tokenizer.tokenize_chat(messages), expected_inputs(processor, text, [image], [video]), processor)


def test_texts_may_have_images_as_in_text_generation_webui(tokenizer, spool):
    images = [("jpeg", spool / "image/0.jpg"), ("png", spool / "image/1.png")]
    for kind in ("webp", "gif"):
        images.append((kind, spool / f"image/2.{kind}"))
        images[-1][1].write_bytes(encoded(photograph(size=(70, 80)), kind))
    text, items = "", []
    for kind, path in images:
        text += f'Look: <img src="data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}">'
        items += [{"text": "Look: "}, {"image": str(path)}]
    path_file = spool / "shm_name.txt"

    def plain(ids):
        return ids[ids >= 0].tolist()

    assert plain(tokenizer.tokenize([{"text": text}], path_file, webui=True)) == plain(tokenizer.tokenize(items))
    message = {"role": "user", "content": text}
    found = tokenizer.tokenize_chat([message], path_file, webui=True)
    assert plain(found) == plain(tokenizer.tokenize_chat([{"role": "user", "content": items}], path_file))
    assert (found < 0).sum() == 8


def test_a_long_data_url_in_a_text_gives_one_warning(tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(webui, "_warned", set())
    short, long = (f"data:image/png;base64,{'A' * count} ?" for count in (978, 979))
    tokenizer.tokenize([{"text": short}])
    assert not caplog.records
    tokenizer.tokenize([{"text": long}])
    tokenizer.tokenize_chat([{"role": "user", "content": long}])
    (record,) = caplog.records
    assert "the text has a data: URL of 1001 characters" in record.message
    assert "webui=True" in record.message


def test_text_alone_needs_neither_arena_nor_path_file(checkpoint_path, processor):
    with Tokenizer.from_pretrained(checkpoint_path) as tokenizer:
        ids = tokenizer.tokenize([{"text": "hello"}, {"text": " world"}])
    assert ids.tolist() == processor.tokenizer("hello world")["input_ids"]


def test_adjacent_media_are_tokenized_as_in_transformers(tokenizer, processor, spool):
    image = spool / "image" / "0.jpg"
    ids = tokenizer.tokenize([{"image": str(image)}] * 2)
    assert_same(ids, expected_inputs(processor, IMAGE * 2, [image, image]), processor)


def test_sources_of_the_same_bytes_have_one_digest(tokenizer, spool):
    data = (spool / "image" / "0.jpg").read_bytes()
    url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    ids = tokenizer.tokenize(
        [{"image": url}, {"image": data}, {"image": data, "max_pixels": 5000}], spool / "shm_name.txt"
    )
    words = ids[ids < 0].tolist()
    digests = [attach(Ref.from_words(*words[i : i + 2])).digest for i in (0, 2, 4)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) >= 16


def test_every_form_of_the_same_frames_gives_the_same_pixels(tokenizer, spool):
    """The path file is beside the folder of the first frame that is given as a path."""
    frames = moving_frames(4, 56, 56)
    images = [Image.fromarray(frame) for frame in frames]
    files = [encoded(image, "PNG") for image in images]
    paths = [spool / "video" / f"{number}.png" for number in range(4)]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
    joined = f"data:video/jpeg;base64,{','.join(url.partition(',')[2] for url in urls)}"
    forms = [
        frames,
        list(frames),
        torch.from_numpy(frames),
        images,
        files,
        paths,
        list(map(str, paths)),
        urls,
        joined,
    ]
    ids = tokenizer.tokenize([{"video": form} for form in forms])
    words = ids[ids < 0].tolist()
    views = [attach(Ref.from_words(*words[i : i + 2])) for i in range(0, len(words), 2)]
    assert len(views) == len(forms)
    for view in views:
        assert np.array_equal(view["pixel_values_videos"], views[0]["pixel_values_videos"])
    digests = [view.digest for view in views]
    assert digests[0] == digests[2] != digests[4] == digests[5] == digests[8]
    assert (spool / "shm_name.txt").exists()


def test_frames_in_another_order_have_another_digest(tokenizer, spool):
    files = [encoded(photograph(name, (56, 56))) for name in ("chelsea.png", "coffee.png")]
    video = [{"video": files}, {"video": files[::-1]}, {"video": [files[0] + files[1][:0], files[1]]}]
    ids = tokenizer.tokenize(video, spool / "shm_name.txt")
    words = ids[ids < 0].tolist()
    first, second, third = (attach(Ref.from_words(*words[i : i + 2])).digest for i in (0, 2, 4))
    assert first == third != second


def test_a_single_placeholder_is_replaced_with_only_the_name_word(tokenizer, spool):
    ids = tokenizer.tokenize([{"image": np.zeros((28, 28, 3), np.uint8), "max_pixels": 784}], spool / "shm_name.txt")
    (word,) = ids[ids < 0].tolist()
    with attach(Ref.from_words(word, None)) as view:
        assert view["pixel_values"].shape == (4, 588)


def test_the_path_file_is_required_if_no_source_is_a_file(tokenizer, spool):
    with pytest.raises(InputError, match="shm_name_save_path is None"):
        tokenizer.tokenize([{"image": np.zeros((56, 56, 3), np.uint8)}])
    mixed = [{"image": np.zeros((56, 56, 3), np.uint8)}, {"image": str(spool / "image" / "0.jpg")}]
    tokenizer.tokenize(mixed)
    assert (spool / "shm_name.txt").exists()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"image": "/no/such.jpg"}, MediaError, "media item 1 .image.: there is no file /no/such.jpg"),
        ({"image": b"junk"}, MediaError, "media item 1 .image.: the 4 bytes cannot be read as an image"),
        ({"image": "truncated"}, MediaError, "media item 1 .image.: the JPEG image of 150x120 pixels is broken"),
        ({"image": "opened"}, MediaError, "media item 1 .image.: the JpegImageFile cannot be read: OSError"),
        ({"audio": b"audio"}, InputError, "does not accept audio"),
        ({"image": "wide"}, LimitExceeded, "media item 1 .image.: the image or video has 401x2 pixels"),
    ],
)
def test_a_failed_item_leaves_no_block(tokenizer, arena, spool, bad, error, message):
    source = bad.get("image")
    if source == "truncated":
        bad = {"image": (spool / "image" / "0.jpg").read_bytes()[:3000]}
    elif source == "opened":
        bad = {"image": Image.open(BytesIO((spool / "image" / "0.jpg").read_bytes()[:3000]))}
    elif source == "wide":
        bad = {"image": encoded(photograph(size=(401, 2)))}
    with pytest.raises(error, match=message):
        tokenizer.tokenize([{"image": str(spool / "image" / "0.jpg")}, bad])
    assert arena.num_blocks == 0
    assert release(spool / "shm_name.txt") == 0


def test_a_video_with_a_wrong_packet_count_is_planned_again(tokenizer, arena, spool):
    """The damaged tail is not sampled, although the container's packet count includes it."""
    whole = encode_video(moving_frames(40), fps=10, container="mpegts")

    def miscounted(data: bytes) -> bool:
        try:
            return not list(EncodedVideo.open(data).decode([0]))
        except Miscounted:
            return True

    data = next(filter(miscounted, (whole[:-size] + bytes(size) for size in range(50, 1500, 50))))
    image = {"image": str(spool / "image" / "0.jpg")}
    for options in ({}, {"num_frames": 2}, {"num_frames": 36}):
        ids = tokenizer.tokenize([image, {"video": data, **options}])
        assert arena.num_blocks == 2
        release(spool / "shm_name.txt")
        with decoding_to_count():
            assert 36 <= EncodedVideo.open(data).num_frames < 40
            counted = tokenizer.tokenize([image, {"video": data, **options}])
        release(spool / "shm_name.txt")
        assert len(ids) == len(counted)


def test_ids_may_be_integers_of_any_type(tokenizer):
    for ids in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), np.array([1, 2, 3], np.int32)):
        assert tokenizer.tokenize_ids(ids).equal(tokenizer.tokenize_ids([1, 2, 3]))
    for wrong in (True, 1.0, "1", None, -1, 2**31, np.array([1]), np.float32(1)):
        with pytest.raises(TokenOutOfRange, match="is not a token id"):
            tokenizer.tokenize_ids([1, wrong])


def test_items_that_do_not_fit_the_arena_are_refused(tokenizer, arena, spool):
    pixels = np.zeros((2800, 2800, 3), np.uint8)
    with pytest.raises((ArenaFull, LimitExceeded)):
        tokenizer.tokenize([{"image": str(spool / "image" / "0.jpg")}, {"image": pixels}])
    assert arena.num_blocks == 0


def test_a_prompt_with_too_many_items_is_refused_before_any_is_decoded(checkpoint_path, spool):
    limits = {"image": 2, "video": 0}
    image, broken = {"image": str(spool / "image/0.jpg")}, {"image": b"not an image"}
    with Tokenizer.from_pretrained(checkpoint_path, limit_mm_per_prompt=limits) as tokenizer:
        assert len(tokenizer.tokenize([image, image])) > 2
        refused = pytest.raises(LimitExceeded, match=r"has 3 media items of kind image; the limit is 2 \(limit_mm")
        with refused:
            tokenizer.tokenize([broken] * 3, spool / "shm_name.txt")
        with refused:
            tokenizer.tokenize_chat([{"role": "user", "content": [broken]}] * 3, spool / "shm_name.txt")
        with refused:
            tokenizer.tokenize_ids([1], [broken] * 3, spool / "shm_name.txt")
        with pytest.raises(LimitExceeded, match="has 1 media items of kind video; the limit is 0"):
            tokenizer.tokenize([{"video": b"not a video"}], spool / "shm_name.txt")
    with pytest.raises(InputError, match=r"limit_mm_per_prompt=\{'images': 2\} must be a map"):
        Tokenizer.from_pretrained(checkpoint_path, limit_mm_per_prompt={"images": 2})


def joined(items: list[dict], spool: Path, max_tokens: int = 0, *, truncate: bool = False) -> TokenizeRequest:
    """Return the request for items that are joined without a template."""
    return request_of_items(
        items, chat=False, path_file=str(spool / "shm_name.txt"), options=PromptOptions(max_tokens, truncate=truncate)
    )


def test_a_long_prompt_is_refused_before_preprocessing(tokenizer, arena, spool):
    items = [{"image": str(spool / "image" / "0.jpg")}, {"text": "what is it?"}]
    with pytest.raises(ContextLengthExceeded, match=r"the prompt has \d+ tokens; the limit is 20"):
        tokenizer.answer(joined(items, spool, 20))
    assert not (spool / "shm_name.txt").exists()
    assert arena.num_blocks == 0


def test_media_tokens_outside_the_vocabulary_are_refused_without_an_engine(tmp_path):
    folder = shutil.copytree(Path(mindie_mm.__file__).parent / "assets/tiny", tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 10
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match="ids must be below 10, the size of the vocabulary"):
        Tokenizer.from_pretrained(folder)


def test_a_rendered_prompt_beyond_the_limit_of_characters_is_refused(tmp_path):
    """The rendered text is checked, because numbers become text only when the template writes them."""
    folder = tmp_path / "tiny"
    shutil.copytree(Path(mindie_mm.__file__).parent / "assets/tiny", folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{{ tools|tojson }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    messages = parse_messages([{"role": "user", "content": "hello"}])

    def request(tools: list[dict], options: PromptOptions) -> TokenizeRequest:
        return TokenizeRequest(messages=messages, chat_template_kwargs={"tools": tools}, options=options)

    with Tokenizer.from_pretrained(folder) as tokenizer:
        few, many = ([{"n": [10**17] * times}] for times in (10, 20_000))
        assert len(tokenizer.answer(request(few, PromptOptions(4096)))) > 100
        for options in (PromptOptions(4096), PromptOptions(4096, truncate=True)):
            with pytest.raises(
                ContextLengthExceeded, match=r"the prompt has \d{6} characters; the limit is .* at most 4096"
            ):
                tokenizer.answer(request(many, options))


def test_a_long_prompt_is_truncated_by_option(tokenizer, arena, spool):
    image = {"image": str(spool / "image" / "0.jpg"), "max_pixels": 8000}
    items = [{"text": "old" * 50}, image, {"text": "middle"}, image, {"text": "what is it?"}]
    whole = tokenizer.answer(joined(items, spool))
    assert arena.num_blocks == 2
    release(spool / "shm_name.txt")
    first = whole.spans[0]
    for max_tokens in range(len(whole) - first.stop - 1, len(whole) - first.start + 2):
        prompt = tokenizer.answer(joined(items, spool, max_tokens, truncate=True))
        assert len(prompt) <= max_tokens
        assert len(prompt.spans) == (2 if max_tokens >= len(whole) - first.start + 1 else 1)
        assert np.array_equal(prompt.plain_ids, whole.plain_ids[-len(prompt) :])
        assert arena.num_blocks == len(prompt.spans)
        assert release(spool / "shm_name.txt") == len(prompt.spans)


def test_the_tokenizers_own_arena_is_removed_when_the_interpreter_ends(checkpoint_path, spool):
    script = f"""
from mindie_mm.tokenize import Tokenizer
tokenizer = Tokenizer.from_pretrained({str(checkpoint_path)!r})
print(len(tokenizer.tokenize([{{"image": {str(spool / "image" / "0.jpg")!r}}}])))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) > 4  # a fixture of all tests checks that no arena remains


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_tokenizers_own_arena_is_removed_when_a_multiprocessing_process_ends(checkpoint_path, spool, method):
    """A forked process ends with os._exit; a spawned process ends as usual."""
    script = f"""
import multiprocessing
from mindie_mm.tokenize import Tokenizer
def work(inputs):
    global tokenizer  # nobody closes it
    tokenizer = Tokenizer.from_pretrained({str(checkpoint_path)!r})
    tokenizer.tokenize(inputs)
if __name__ == "__main__":
    inputs = [{{"image": {str(spool / "image" / "0.jpg")!r}}}]
    process = multiprocessing.get_context({method!r}).Process(target=work, args=(inputs,))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
    (spool / "work.py").write_text(script)
    subprocess.run([sys.executable, spool / "work.py"], timeout=300, check=True)


def test_a_closed_tokenizer_has_no_arena_and_refuses_requests(checkpoint_path, spool):
    inputs = [{"image": str(spool / "image" / "0.jpg")}]
    with Tokenizer.from_pretrained(checkpoint_path) as tokenizer:
        tokenizer.tokenize(inputs)
    tokenizer.close()
    for use in (
        lambda: tokenizer.tokenize(inputs),
        lambda: tokenizer.tokenize_ids([1, 2]),
        lambda: tokenizer.tokenize_chat([{"role": "user", "content": "Hello"}]),
    ):
        with pytest.raises(InputError, match="the tokenizer is closed"):
            use()


def test_the_tokenizers_own_arena_is_replaced_if_it_was_removed(checkpoint_path, spool):
    inputs = [{"image": str(spool / "image" / "0.jpg")}]
    with Tokenizer.from_pretrained(checkpoint_path) as tokenizer:
        first = tokenizer.tokenize(inputs)
        number = Ref.from_words(*first[first < 0].tolist()).arena
        Path(f"/dev/shm/mindie_mm-{number:04x}").unlink()
        second = tokenizer.tokenize(inputs)
        ref = Ref.from_words(*second[second < 0].tolist())
        assert ref.arena != number
        attach(ref).verify()


def test_the_tokenizers_own_arena_is_replaced_if_it_is_removed_while_writing(checkpoint_path, spool, monkeypatch):
    own, left = Arena.allocate, iter([True])

    def allocate(arena, *arguments, **settings):
        if next(left, False):
            arena.path.unlink()
            arena._file._seen_ns = 0  # as if the last check had been long ago
        return own(arena, *arguments, **settings)

    monkeypatch.setattr(Arena, "allocate", allocate)
    with Tokenizer.from_pretrained(checkpoint_path) as tokenizer:
        ids = tokenizer.tokenize([{"image": str(spool / "image" / "0.jpg")}])
        attach(Ref.from_words(*ids[ids < 0].tolist())).verify()


def test_a_request_beyond_its_quota_is_refused(checkpoint_path, spool):
    image = {"image": str(spool / "image" / "0.jpg")}
    with Arena.create(2**20, quota_bytes=60_000) as arena:
        tokenizer = Tokenizer.from_pretrained(checkpoint_path, arena=arena)
        with pytest.raises(LimitExceeded, match="a request may hold at most 60000 bytes"):
            tokenizer.tokenize([image, image])
        assert arena.num_blocks == 0
        tokenizer.tokenize([image])


def test_transparent_pixels_show_the_configured_background(checkpoint_path, arena, tmp_path):
    """The background applies to files, image objects and frames. Different backgrounds give different digests."""
    clear = Image.new("RGBA", (56, 56))
    files = [encoded(clear, name) for name in ("PNG", "WEBP", "AVIF")]
    items = [*({"image": source} for source in (*files, clear)), {"video": [files[0], clear] * 2}]
    names = ("pixel_values",) * 4 + ("pixel_values_videos",)
    digests = []
    for colour in ((255, 255, 255), (255, 0, 0)):
        caps, path_file = MediaCaps(rgba_background_color=colour), tmp_path / "shm_name.txt"
        with Tokenizer.from_pretrained(checkpoint_path, arena=arena, caps=caps) as tokenizer:
            ids = tokenizer.tokenize(items, path_file)
            words = ids[ids < 0].tolist()
            for place, name in enumerate(names):
                with attach(Ref.from_words(*words[2 * place : 2 * place + 2])) as view:
                    assert (view[name].reshape(-1, 3) == colour).all(), (name, place)
                    digests.append(view.digest)
        release(path_file)
    assert not {*digests[:5]} & {*digests[5:]}


def test_decoded_pixels_are_counted_per_request(checkpoint_path, arena, tmp_path):
    image, path_file = encoded(photograph(size=(300, 200))), tmp_path / "shm_name.txt"
    caps = MediaCaps(max_request_pixels=120_000)
    with Tokenizer.from_pretrained(checkpoint_path, arena=arena, caps=caps) as tokenizer:
        for _ in range(3):
            tokenizer.tokenize([{"image": image}] * 2, path_file)
            release(path_file)
        with pytest.raises(LimitExceeded, match=r"media item 2 .image.: .* at least 180000 pixels .* limit is 120000"):
            tokenizer.tokenize([{"image": image}] * 3, path_file)
        assert arena.num_blocks == 0
