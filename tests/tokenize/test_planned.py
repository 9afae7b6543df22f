"""Tests for plans of prompts: ids, spans and digests from the headers of media."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mindie_mm.errors import InputError, MediaError, Miscounted
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.guard.caps import decoding_to_count
from mindie_mm.media.image.encoded_image import open_image
from mindie_mm.shm import Arena, Ref, arenas_of, attach, release
from mindie_mm.shm.format.item import ITEM
from mindie_mm.tokenize import Tokenizer
from tests.attacks.images import chunk
from tests.audio_samples import encode_audio, encode_with_ffmpeg, speech, tone
from tests.heic_samples import coded, heif
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.models.test_qwen2_audio import TestQwen2Audio as _Qwen2Audio


def chat(*media: dict, text: str = "What is this?", **extra) -> list[dict]:
    return [{"role": "user", "content": [*media, {"text": text}], **extra}]


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def upright(image: Image.Image) -> bytes:
    return encoded(image, exif=turned())


def xmp() -> PngInfo:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>')
    return info


def long_text() -> PngInfo:
    info = PngInfo()
    info.add_text("workflow", "x" * 2_000_000)
    return info


CHATS = {
    "text": (chat(), {}),
    "jpeg": (chat({"image": encoded(photograph(size=(300, 200)))}), {}),
    "turned": (chat({"image": upright(photograph(size=(300, 200)))}), {}),
    "options": (chat({"image": encoded(photograph(size=(300, 200))), "min_pixels": 784, "max_pixels": 20_000}), {}),
    "several": (
        chat({"image": encoded(photograph(size=(90, 50)), "PNG")}, {"image": photograph("rocket.jpg", (64, 99))}),
        {},
    ),
    "video": (chat({"video": encode_video(moving_frames(17))}, {"image": photograph(size=(60, 60))}), {}),
    "frames": (chat({"video": moving_frames(6), "sample_fps": 2}), {"add_generation_prompt": False}),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_plan_has_the_ids_spans_sizes_and_digests_of_the_prompt(tokenizer, tmp_path, name):
    messages, options = CHATS[name]
    plan = tokenizer.plan(messages, **options)
    ids = tokenizer.tokenize_chat(messages, tmp_path / "shm_name.txt", **options).numpy()
    assert plan.ids.dtype == np.int64
    assert len(plan) == len(ids)
    assert (plan.ids == ids)[ids >= 0].all()
    handles = ids[ids < 0]
    assert len(handles) == 2 * len(plan.spans)
    for span in plan.spans:
        own = ids[span.start : span.stop]
        assert (plan.ids[span.start : span.stop] == span.token).sum() == span.num_features
        with attach(Ref.from_words(*own[own < 0].tolist())) as view:
            assert view.digest == span.digest
            assert span.num_bytes == sum(view[name].nbytes for name in view if name != ITEM)


def test_a_plan_uses_no_shared_memory_and_writes_no_file(checkpoint_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Tokenizer.from_pretrained(checkpoint_path) as tokenizer:
        plan = tokenizer.plan(CHATS["several"][0])
        assert len(plan.spans) == 2
        assert not [*arenas_of([os.getpid()])]
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("copied_workers")
def test_a_plan_with_decoder_processes_is_the_same(checkpoint_path, tokenizer):
    with Tokenizer.from_pretrained(checkpoint_path, decoders=1) as sandboxed:
        for messages in (CHATS["several"][0], CHATS["video"][0]):
            ours, theirs = sandboxed.plan(messages), tokenizer.plan(messages)
            assert ours.ids.tolist() == theirs.ids.tolist()
            assert ours.spans == theirs.spans


def test_equal_headers_have_equal_spans_but_other_digests(tokenizer):
    one, other = (tokenizer.plan(chat({"image": image(value)})) for value in (0, 255))
    (first,), (second,) = one.spans, other.spans
    assert (first.start, first.stop) == (second.start, second.stop)
    assert first.digest != second.digest


def image(value: int) -> bytes:
    return encoded(Image.new("RGB", (120, 80), (value, value, value)), "PNG")


def test_a_plan_refuses_what_a_prompt_refuses(tokenizer):
    with pytest.raises(MediaError, match=r"media item 0 \(image\)"):
        tokenizer.plan(chat({"image": b"no image"}))
    with pytest.raises(InputError, match="audio"):
        tokenizer.plan(chat({"audio": b"RIFF"}))
    with pytest.raises(InputError, match="tools is of type str"):
        tokenizer.plan(chat(), tools="look")


def jpeg(**options: object) -> bytes:
    return encoded(photograph(size=(300, 100)), **options)


def saved(mode: str, file_format: str, **options: object) -> bytes:
    return encoded(photograph(size=(300, 100)).convert(mode), file_format, **options)


def turned_at_end() -> bytes:
    """Return a PNG whose orientation is behind its pixels."""
    png = saved("RGB", "PNG")
    return png[:-12] + chunk(b"eXIf", turned().tobytes()[6:]) + png[-12:]


UNDECODED = {
    "JPEG": jpeg(),
    "progressive JPEG": jpeg(progressive=True),
    "JPEG with orientation": upright(photograph(size=(300, 100))),
    "gray JPEG": saved("L", "JPEG"),
    "CMYK JPEG": saved("CMYK", "JPEG"),
    "PNG": saved("RGB", "PNG"),
    "PNG with alpha": saved("RGBA", "PNG"),
    "PNG with palette": saved("P", "PNG"),
    "PNG with orientation": saved("RGB", "PNG", exif=turned()),
    "PNG with XMP": saved("RGB", "PNG", pnginfo=xmp()),
    "PNG with orientation behind its pixels": turned_at_end(),
    "PNG with a long text": saved("RGB", "PNG", pnginfo=long_text()),
    "AVIF": saved("RGB", "AVIF"),
    "GIF": saved("P", "GIF"),
    "BMP": saved("RGB", "BMP"),
    "TIFF": saved("RGB", "TIFF", compression="tiff_deflate"),
    "lossy WebP": saved("RGB", "WEBP"),
    "WebP with alpha": saved("RGBA", "WEBP"),
    "JPEG 2000": saved("RGB", "JPEG2000"),
    "PPM": saved("RGB", "PPM"),
    "ICO": saved("RGBA", "ICO", sizes=[(256, 100)]),
    "HEIC": heif([coded(np.asarray(photograph(size=(300, 100))))]),
}
"""Images that are planned without decoding them."""
FRAMES = moving_frames(9)
UNDECODED_VIDEOS = {
    "H.264 in MP4": {"container": "mp4"},
    "H.264 in MOV": {"container": "mov"},
    "HEVC in MKV": {"container": "matroska", "codec": "libx265"},
    "VP8 in WebM": {"container": "webm", "codec": "libvpx"},
    "VP9 in WebM": {"container": "webm", "codec": "libvpx-vp9"},
    "AV1 in MP4": {"codec": "libsvtav1"},
    "MPEG-4 in AVI": {"container": "avi", "codec": "mpeg4"},
    "MPEG-4 with B-frames in MP4": {"codec": "mpeg4", "options": {"bf": "2"}},
    "MPEG-1 in MPEG-PS": {"container": "mpeg", "codec": "mpeg1video", "fps": 25},
    "MPEG-2 in MPEG-TS": {"container": "mpegts", "codec": "mpeg2video", "options": {"bf": "2"}, "fps": 25},
    "WMV 7 in ASF": {"container": "asf", "codec": "wmv1"},
    "WMV 8 in ASF": {"container": "asf", "codec": "wmv2"},
    "H.263 in AVI": {"container": "avi", "codec": "h263p"},
    "MS MPEG-4 in AVI": {"container": "avi", "codec": "msmpeg4"},
    "Sorenson in FLV": {"container": "flv", "codec": "flv"},
}
"""Arguments of `encode_video` for videos that are planned without decoding them."""
AUDIO = tone(1.3, 48_000)
UNDECODED_CLIPS = {
    "speech": speech(1),
    **{name: encode_audio(AUDIO, 48_000, name) for name in ("WAV", "RF64", "FLAC", "AIFF", "CAF", "W64", "AU", "NIST")},
    "Opus in Ogg": encode_audio(AUDIO, 48_000, "OGG", "OPUS"),
    "MP3": encode_audio(AUDIO, 48_000, "MP3", "MPEG_LAYER_III"),
    "mu-law in AU": encode_audio(AUDIO, 48_000, "AU", "ULAW"),
    "A-law in WAV": encode_audio(AUDIO, 48_000, "WAV", "ALAW"),
    "MS ADPCM in WAV": encode_audio(AUDIO, 48_000, "WAV", "MS_ADPCM"),
    "ADPCM in WAV": encode_audio(AUDIO, 48_000, "WAV", "IMA_ADPCM"),
    "GSM in WAV": encode_audio(AUDIO, 48_000, "WAV", "GSM610"),
    "ALAC in CAF": encode_audio(AUDIO, 48_000, "CAF", "ALAC_16"),
    "AAC in M4A": encode_with_ffmpeg(AUDIO, 48_000, "ipod", "aac"),
    "ALAC in M4A": encode_with_ffmpeg(AUDIO, 48_000, "ipod", "alac"),
    "Opus in MP4": encode_with_ffmpeg(AUDIO, 48_000, "mp4", "libopus"),
    "MP3 in MP4": encode_with_ffmpeg(AUDIO, 48_000, "mp4", "libmp3lame"),
    "AAC in ADTS": encode_with_ffmpeg(AUDIO, 48_000, "adts", "aac"),
    "Opus in WebM": encode_with_ffmpeg(AUDIO, 48_000, "webm", "libopus"),
    "PCM in AVI": encode_with_ffmpeg(AUDIO, 48_000, "avi", "pcm_s16le"),
    "PCM in MOV": encode_with_ffmpeg(AUDIO, 48_000, "mov", "pcm_s16le"),
    "PCM in MKV": encode_with_ffmpeg(AUDIO, 48_000, "matroska", "pcm_s16le"),
    "AMR": (Path(__file__).parents[1] / "cases/films/voice.amr").read_bytes(),
}
"""Audio clips that are planned without decoding them."""


@pytest.fixture
def no_decoding(monkeypatch) -> None:
    """Make every decoder of media raise an error in this process."""

    def decode(*args: object, **options: object) -> None:
        raise AssertionError("a plan decodes")

    for place in (
        *(
            "PIL.ImageFile.ImageFile.load",
            "PIL.GifImagePlugin.GifImageFile.load",
            "PIL.TiffImagePlugin.TiffImageFile.load",
        ),
        *("PIL.WebPImagePlugin.WebPImageFile.load", "simplejpeg.decode_jpeg"),
        "mindie_mm.media.video.encoded_video._stream_to_decode",
        "mindie_mm.media.audio.encoded_audio.frames_of",
        *(f"mindie_mm.media.image.{name}.decode" for name in ("anymap.Anymap", "heic.HeicImage")),
    ):
        monkeypatch.setattr(place, decode)


@pytest.mark.parametrize("name", UNDECODED)
@pytest.mark.usefixtures("no_decoding")
def test_images_are_planned_without_decoding(tokenizer, name):
    assert tokenizer.plan(chat({"image": UNDECODED[name]})).spans[0].num_features > 1


@pytest.mark.parametrize("name", UNDECODED_VIDEOS)
@pytest.mark.usefixtures("no_decoding")
def test_videos_are_planned_without_decoding(tokenizer, name):
    video = encode_video(FRAMES, **UNDECODED_VIDEOS[name])
    assert tokenizer.plan(chat({"video": video})).spans[0].num_features > 1


@pytest.fixture(scope="module")
def audio_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a small checkpoint for audio clips of up to 2 s."""
    path = tmp_path_factory.mktemp("audio")
    _Qwen2Audio.write_checkpoint(path)
    return path


@pytest.fixture
def listener(audio_checkpoint: Path, arena: Arena) -> Iterator[Tokenizer]:
    with Tokenizer.from_pretrained(audio_checkpoint, arena=arena) as opened:
        yield opened


@pytest.mark.parametrize("name", UNDECODED_CLIPS)
@pytest.mark.usefixtures("no_decoding")
def test_audio_clips_are_planned_without_decoding(listener, name):
    assert listener.plan(chat({"audio": UNDECODED_CLIPS[name]})).spans[0].num_features > 1


@pytest.mark.parametrize("name", UNDECODED_CLIPS)
def test_the_plan_of_an_audio_clip_is_that_of_its_samples(listener, name):
    plan = listener.plan(chat({"audio": UNDECODED_CLIPS[name]}))
    with decoding_to_count():
        decoded = listener.plan(chat({"audio": UNDECODED_CLIPS[name]}))
    assert plan.ids.tolist() == decoded.ids.tolist()
    assert plan.spans == decoded.spans


@pytest.mark.usefixtures("no_decoding")
def test_a_plan_decodes_audio_whose_samples_packets_do_not_count(listener):
    """The number of samples of a Vorbis packet depends on the packet before it."""
    with pytest.raises(AssertionError, match="a plan decodes"):
        listener.plan(chat({"audio": encode_audio(AUDIO, 48_000, "OGG", "VORBIS")}))


def test_a_clip_with_fewer_samples_than_its_packets_indicate_is_planned_again(listener, tmp_path):
    """FFmpeg passes over frames that cannot be decoded, but they are packets like others."""
    whole = encode_with_ffmpeg(AUDIO, 48_000, "adts", "aac")
    frames = whole.split(whole[:4])
    frames[20:24] = [frame[:3] + bytes(len(frame) - 3) for frame in frames[20:24]]
    data = whole[:4].join(frames)
    clip = open_audio(data).clip(16_000, 32_000)
    with pytest.raises(Miscounted, match=rf"^1\d+ samples at 16000 Hz .* indicate {clip.num_samples}$"):
        clip.decode()
    ids = listener.tokenize_chat(chat({"audio": data}), tmp_path / "shm_name.txt")
    release(tmp_path / "shm_name.txt")
    with decoding_to_count():
        assert len(ids) == len(listener.plan(chat({"audio": data})))
    assert len(ids) < len(listener.plan(chat({"audio": data})))


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize("name", ["PNG with orientation", "PNG with XMP", "PNG with orientation behind its pixels"])
def test_the_orientation_of_a_png_is_found_without_decoding(name):
    opened = open_image(UNDECODED[name])
    assert (opened.width, opened.height) == (100, 300)


@pytest.mark.usefixtures("no_decoding")
def test_a_plan_decodes_a_video_whose_frames_packets_do_not_count(tokenizer):
    """FFmpeg may write a packet that repeats the previous frame."""
    video = encode_video(FRAMES, container="mov", codec="qtrle")
    with pytest.raises(AssertionError, match="a plan decodes"):
        tokenizer.plan(chat({"video": video}))
