"""Tests for audio decoding."""

import base64
import io
import struct
import wave
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from av.container import InputContainer
from av.stream import Disposition
from transformers.audio_utils import load_audio

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.inputs import Media, parse_inputs
from mindie_mm.media.audio import encoded_audio as audio
from mindie_mm.media.audio.encoded_audio import EncodedAudio, open_audio
from mindie_mm.media.guard.caps import under
from mindie_mm.media.guard.container import open_container
from mindie_mm.media.source import read_source
from mindie_mm.settings.config import MediaCaps
from tests.audio_samples import SPEECH_RATE, encode_audio, encode_with_ffmpeg, speech, tone
from tests.media_samples import encode_video, moving_frames

CASES = Path(__file__).parents[1] / "cases/media"
FILMS = Path(__file__).parents[1] / "cases/films"
RATE = 16_000
LOSSLESS = [
    ("WAV", "PCM_U8"),
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "PCM_32"),
    ("WAV", "FLOAT"),
    ("WAV", "DOUBLE"),
    ("WAV", "ULAW"),
    ("WAVEX", "PCM_16"),
    ("AIFF", "PCM_16"),
    ("CAF", "PCM_16"),
    ("CAF", "FLOAT"),
    ("W64", "PCM_16"),
    ("W64", "FLOAT"),
    ("FLAC", "PCM_16"),
    ("FLAC", "PCM_24"),
    ("AU", "PCM_16"),
    ("AU", "PCM_24"),
    ("AU", "FLOAT"),
    ("AU", "ULAW"),
    ("NIST", "PCM_16"),
    ("NIST", "PCM_32"),
    ("NIST", "ALAW"),
]


def reference(data: bytes) -> np.ndarray:
    url = f"data:;base64,{base64.b64encode(data).decode()}"
    return load_audio(url, sampling_rate=RATE, backend="soundfile")


def decode(data: bytes, max_samples: int = 60 * RATE) -> np.ndarray:
    return open_audio(data).decode(RATE, max_samples)


def test_speech_is_equal_to_the_reference():
    data = speech()
    assert EncodedAudio.open(data).rate == SPEECH_RATE
    assert np.array_equal(decode(data), reference(data))


@pytest.mark.parametrize(
    ("file_format", "subtype", "rate", "channels"),
    [
        (*kind, rate, channels)
        for kind in LOSSLESS
        for i, rate in enumerate((8_000, 16_000, 44_100, 48_000))
        for j, channels in enumerate((1, 2, 6, 8))
        if kind == LOSSLESS[0] or i == j  # how samples are stored affects neither resampling nor mixing
    ],
)
def test_lossless_files_are_equal_to_the_reference(file_format, subtype, rate, channels):
    data = encode_audio(tone(0.7, rate, channels=channels), rate, file_format, subtype)
    found = decode(data)
    assert found.dtype == np.float32
    assert np.array_equal(found, reference(data))


@pytest.mark.parametrize("rate", [16_000, 48_000])
@pytest.mark.parametrize(
    ("file_format", "subtype", "tolerance"),
    [("MP3", "MPEG_LAYER_III", 1e-6), ("OGG", "VORBIS", 1e-6), ("OGG", "OPUS", 0.005)],
)
def test_lossy_files_are_near_the_reference(file_format, subtype, tolerance, rate):
    check_near_the_reference(tone(1.3, rate), rate, file_format, subtype, tolerance)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize(("file_format", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")])
def test_speech_that_is_resampled_in_pieces_equals_the_whole(file_format, subtype, rate):
    if rate == 8_000 and subtype == "VORBIS":
        pytest.skip("libsndfile writes no Vorbis at this rate")
    opened = open_audio(encode_audio(tone(2.7, rate), rate, file_format, subtype))
    whole = opened.decode(RATE, 3 * RATE)
    speech_samples = opened.speech(RATE)
    assert speech_samples.dtype == np.int16
    assert abs(len(speech_samples) - len(whole)) <= 1
    length = min(len(speech_samples), len(whole))
    assert np.abs(speech_samples[:length] / 2**15 - np.clip(whole[:length], -1, 1)).max() < 1e-3


def test_speech_has_the_limits_of_other_audio():
    data = encode_audio(tone(2.0), RATE)
    with under(MediaCaps(max_audio_samples=RATE)), pytest.raises(LimitExceeded, match="more samples than the limit"):
        open_audio(data).speech(RATE)
    with pytest.raises(MediaError, match="truncated"):
        open_audio(data[: len(data) // 2]).speech(RATE)


@pytest.mark.parametrize("channels", [7, 8, 9, 32])
@pytest.mark.parametrize(("subtype", "tolerance"), [("VORBIS", 1e-6), ("OPUS", 0.005)])
def test_many_planar_channels_are_near_the_reference(subtype, tolerance, channels):
    check_near_the_reference(tone(1.3, 48_000, 200, channels), 48_000, "OGG", subtype, tolerance)


@pytest.mark.parametrize("layout", ["stereo", "5.1", "7.1"])
@pytest.mark.parametrize(("container", "codec"), [("caf", "pcm_s16be"), ("aiff", "pcm_s16be"), ("w64", "pcm_s16le")])
def test_containers_with_a_channel_layout_are_equal_to_the_reference(container, codec, layout):
    samples = tone(0.7, RATE, 200, av.AudioLayout(layout).nb_channels)
    data = encode_with_ffmpeg(samples, RATE, container, codec, layout)
    for _ in range(5):
        assert np.array_equal(decode(data), reference(data))


def check_near_the_reference(samples: np.ndarray, rate: int, file_format: str, subtype: str, tolerance: float) -> None:
    data = encode_audio(samples, rate, file_format, subtype)
    found, expected = decode(data), reference(data)
    assert len(found) == len(expected)
    # The two decoders are different implementations, and decode Opus at different sample rates.
    assert np.sqrt(np.mean((found - expected) ** 2)) <= tolerance


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "aac"),
        ("adts", "aac"),
        ("ipod", "alac"),
        ("mov", "pcm_s16le"),
        ("webm", "libopus"),
        ("matroska", "libmp3lame"),
        ("asf", "wmav2"),
        ("mpegts", "aac"),
        ("mpegts", "mp2"),
        ("mpegts", "ac3"),
        ("mpegts", "libopus"),
        ("mpeg", "mp2"),
        ("vob", "ac3"),
        ("flv", "libmp3lame"),
        ("flv", "aac"),
        ("avi", "pcm_s16le"),
        ("avi", "libmp3lame"),
        ("au", "pcm_mulaw"),
    ],
)
def test_formats_that_libsndfile_cannot_read_are_decoded(container, codec):
    samples = tone(1.5, 48_000)
    found = decode(encode_with_ffmpeg(samples, 48_000, container, codec))
    original = audio._resample(samples, 48_000, RATE, 60 * RATE)
    best = max(
        np.corrcoef(original[2000:20_000], found[2000 + shift : 20_000 + shift])[0, 1] for shift in range(0, 1200, 1)
    )
    assert best > 0.99, "no shift aligns the decoded samples with the original"


def test_voice_messages_in_amr_are_decoded():
    found = decode((FILMS / "voice.amr").read_bytes())
    loud = np.abs(found).reshape(-1, 80).max(axis=1) > 0.1
    beeps = np.count_nonzero(np.diff(np.flatnonzero(loud)) > 8) + 1
    assert (len(found) / RATE, beeps) == (1.02, 3)


def test_wideband_amr_is_decoded():
    silence = b"#!AMR-WB\n" + 50 * (b"\x44" + bytes(60))  # frames of 20 ms at 23.85 kbit/s
    assert EncodedAudio.open(silence).rate == RATE
    assert len(decode(silence)) == RATE


def test_a_transport_stream_with_only_audio_is_decoded():
    data = (CASES / "tone.ts").read_bytes()
    with av.open(io.BytesIO(data)) as container:
        frames = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
        rate = container.streams.audio[0].rate
    found = open_audio(data).decode(rate, 10**7)
    assert np.array_equal(found, frames)
    assert np.abs(found).max() > 0.1


@pytest.mark.parametrize(("container", "codec"), [("mpegts", "aac"), ("mpegts", "mp2"), ("mpeg", "mp2")])
def test_a_recording_that_starts_and_ends_in_the_middle_of_a_frame_is_decoded(container, codec):
    data = encode_with_ffmpeg(tone(2.0, 48_000), 48_000, container, codec)
    whole = open_audio(data).decode(48_000, 10**6)
    cut = data[188 * 20 + 77 : -300] if container == "mpegts" else data[5000:-300]
    assert len(open_audio(cut).decode(48_000, 10**6)) > 0.6 * len(whole)


@pytest.mark.parametrize(
    ("container", "images", "audio"),
    [
        ("mpegts", "mpeg2video", "mp2"),
        ("mpeg", "mpeg2video", "mp2"),
        ("flv", "flv1", "libmp3lame"),
        ("avi", "mpeg4", "libmp3lame"),
        ("asf", "mpeg4", "libmp3lame"),
        ("mp4", "mpeg4", "aac"),
    ],
)
def test_the_audio_of_a_video_is_decoded(container, images, audio):
    data = film(container, images, audio)
    with av.open(io.BytesIO(data)) as opened:
        expected = np.concatenate([frame.to_ndarray()[0] for frame in opened.decode(audio=0)])
    if expected.dtype == np.int16:
        expected = expected / np.float32(2**15)
    assert len(expected) >= 23_000
    assert np.array_equal(open_audio(data).decode(48_000, 10**7), expected)


def film(container: str, images: str, audio: str) -> bytes:
    """Encode half a second of video with audio."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        image = output.add_stream(images, rate=25)
        image.width, image.height, image.pix_fmt = 112, 84, "yuv420p"
        stream = output.add_stream(audio, rate=48_000, layout="mono")
        stream.format = stream.codec.audio_formats[0]
        for pixels in moving_frames(13):
            output.mux(image.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(image.encode())
        frame = av.AudioFrame.from_ndarray(tone(0.5, 48_000)[None], format="flt", layout="mono")
        frame.sample_rate = 48_000
        for piece in av.AudioResampler(stream.format, "mono", 48_000, frame_size=stream.frame_size).resample(frame):
            output.mux(stream.encode(piece))
        output.mux(stream.encode())
    return file.getvalue()


def test_a_video_without_audio_is_refused():
    silent = encode_video(moving_frames(4))
    with pytest.raises(MediaError, match="no audio stream"):
        open_audio(silent)


def two_tracks(first: Disposition, second: Disposition) -> bytes:
    """Encode a file with two tracks, whose samples are 100 and 200."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        streams = [output.add_stream("pcm_s16le", rate=RATE, layout="mono") for _ in range(2)]
        streams[0].disposition, streams[1].disposition = first, second
        for stream, value in zip(streams, (100, 200), strict=True):
            frame = av.AudioFrame.from_ndarray(np.full((1, RATE), value, np.int16), format="s16", layout="mono")
            frame.sample_rate = RATE
            output.mux([*stream.encode(frame), *stream.encode()])
    return file.getvalue()


def test_the_default_track_is_decoded():
    assert set(decode(two_tracks(Disposition(0), Disposition.default))) == {np.float32(200 / 2**15)}


@pytest.mark.parametrize("codec", [b"A_UNKNOWN/LIT", b"A_REAL/COOK\0\0"])
@pytest.mark.parametrize("other", [Disposition(0), Disposition.hearing_impaired])
def test_a_track_that_cannot_be_decoded_is_passed_over(codec, other):
    """FFmpeg's av_find_best_stream passes over such tracks if its caller needs a decoder."""
    data = two_tracks(Disposition.default, other).replace(b"A_PCM/INT/LIT", codec, 1)
    assert set(decode(data)) == {np.float32(200 / 2**15)}
    with pytest.raises(MediaError, match=r"the audio stream has an unknown codec|a codec that is not supported"):
        decode(data.replace(b"A_PCM/INT/LIT", codec))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sample", [1e300, -1e39, np.nan, np.inf])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_beyond_float32_are_refused_without_a_warning(channels, sample):
    data = encode_audio(np.full((100, channels), sample), RATE, "WAV", "DOUBLE")
    with pytest.raises(MediaError, match="the audio clip has a sample of amplitude"):
        decode(data)


@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_a_clip_that_is_longer_than_the_limit_is_refused(rate):
    data = encode_audio(tone(9.0, rate), rate, "WAV", "FLOAT")
    assert np.array_equal(decode(data, max_samples=9 * RATE), reference(data))
    with pytest.raises(LimitExceeded, match=r"lasts 9\.0 s; the limit of this model is 8.99987 s\. Cut the clip"):
        decode(data, max_samples=9 * RATE - 2)
    with pytest.raises(LimitExceeded, match=r"lasts 9\.0 s; the limit of this model is 5 s"):
        open_audio(tone(9.0, rate), rate).decode(RATE, 5 * RATE)
    broken_behind = data[: int(len(data) * 0.8)]
    with pytest.raises(LimitExceeded, match=r"the limit of this model is 5 s"):
        decode(broken_behind, max_samples=5 * RATE)


@pytest.mark.parametrize(("num_more", "text"), [(1, "2.0001"), (16, "2.001"), (320, "2.02"), (1600, "2.1")])
def test_the_length_of_a_refused_clip_has_enough_digits(num_more, text):
    samples = tone(3.0)[: 2 * RATE + num_more]
    for one in (open_audio(samples), open_audio(encode_audio(samples, RATE))):
        with pytest.raises(LimitExceeded, match=rf"lasts {text} s; the limit of this model is 2 s"):
            one.decode(RATE, 2 * RATE)
    with (
        under(MediaCaps(max_audio_seconds=2)),
        pytest.raises(LimitExceeded, match=rf"lasts {text} s; the limit is 2 s"),
    ):
        open_audio(encode_audio(samples, RATE))


@pytest.mark.parametrize(
    ("container", "codec"), [("adts", "aac"), ("mp3", "libmp3lame"), ("mp4", "aac"), ("amr", "libopencore_amrnb")]
)
def test_the_padding_of_a_lossy_format_does_not_count(container, codec):
    rate = 8000 if container == "amr" else RATE
    data = encode_with_ffmpeg(tone(3.0, rate), rate, container, codec)
    assert 0 <= len(decode(data)) - 3 * RATE < 0.2 * RATE
    assert len(decode(data, 3 * RATE)) == 3 * RATE
    with pytest.raises(LimitExceeded, match=r"the limit of this model is 2\.5 s"):
        decode(data, 5 * RATE // 2)


@pytest.mark.parametrize("codec", ["aac", "alac", "libmp3lame"])
@pytest.mark.parametrize(("skipped", "shown"), [(0, 1), (0, 0.5), (0.1, 0.5), (0.013, 1), (0.5, 0.2)])
def test_packets_count_the_samples_that_an_edit_list_shows(codec, skipped, shown):
    data = encode_with_ffmpeg(tone(1.3, 44_100), 44_100, "ipod" if codec == "alac" else "mp4", codec)
    at = data.index(b"elst") + 12
    duration, begin = struct.unpack_from(">Ii", data, at)
    edit = struct.pack(">Ii", int(duration * shown), begin + int(1.3 * 44_100 * skipped))
    clip = open_audio(data[:at] + edit + data[at + 8 :]).clip(RATE, 60 * RATE)
    assert len(clip.decode()) == clip.num_samples


def test_a_clip_of_too_many_packets_is_decoded_up_to_the_limit_of_the_model(monkeypatch):
    monkeypatch.setattr("mindie_mm.media.audio.packet_samples._MAX_PACKETS", 50)
    data = encode_audio(tone(3.0), RATE, "MP3", "MPEG_LAYER_III")
    opened = open_audio(data)
    assert opened.num_in_packets is None
    assert opened.clip(RATE, 4 * RATE).num_samples == 3 * RATE
    with pytest.raises(LimitExceeded, match="the limit of this model is 1 s"):
        opened.clip(RATE, RATE)


@pytest.mark.parametrize(("file_format", "subtype"), [*LOSSLESS, ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.95])
def test_the_plan_of_a_truncated_clip_is_refused_or_has_its_samples(file_format, subtype, kept):
    data = encode_audio(tone(1.3, 48_000), 48_000, file_format, subtype)
    data = data[: int(len(data) * kept)]
    try:
        clip = open_audio(data).clip(RATE, 60 * RATE)
    except MediaError:
        with pytest.raises(MediaError):
            decode(data)
        return
    try:
        samples = decode(data)
    except MediaError:
        with pytest.raises(MediaError):
            clip.decode()
        return
    assert np.array_equal(clip.decode(), samples)
    assert len(samples) == clip.num_samples


@pytest.mark.parametrize(
    ("container", "valid"),
    [
        (8, 6),
        (16, 10),
        (16, 12),
        (16, 24),
        (24, 16),
        (24, 20),
        (32, 8),
        (32, 16),
        (32, 20),
        (32, 24),
        (32, 28),
        (32, 0),
    ],
)
def test_samples_are_read_by_the_size_of_their_container(container, valid):
    data = encode_extensible(tone(0.5, RATE, channels=2), container, valid)
    assert np.array_equal(decode(data), reference(data))


@pytest.mark.parametrize(("container", "valid"), [(32, 24), (32, 20), (24, 20), (16, 12)])
@pytest.mark.parametrize("block", [0, 1, 3, 4, 6, 7, 8, 64])
def test_a_false_block_size_is_corrected(container, valid, block):
    data = encode_extensible(tone(0.5, RATE, channels=2), container, valid)
    assert np.array_equal(decode(with_format(data, block=block)), decode(data))


@pytest.mark.parametrize(("block", "bytes_per_s"), [(6, 6 * RATE), (3, 3 * RATE), (0, 0)])
def test_valid_bits_in_containers_of_an_unclear_size_are_refused(block, bytes_per_s):
    data = encode_extensible(tone(0.5, RATE, channels=2), 32, 24)
    expected = f"blocks of {block} bytes and {bytes_per_s} bytes per second, which contradicts 2 channels of 32 bits"
    with pytest.raises(MediaError, match=expected):
        decode(with_format(data, block=block, bytes_per_s=bytes_per_s))


@pytest.mark.parametrize("bits", [0, 20])
def test_containers_that_are_not_whole_bytes_are_refused(bits):
    data = encode_extensible(tone(0.5, RATE, channels=2), 32, 20)
    with pytest.raises(MediaError, match=f"which contradicts 2 channels of {bits} bits at {RATE} Hz"):
        decode(with_format(data, bits=bits))


def with_format(wav: bytes, block: int = 8, bytes_per_s: int | None = None, bits: int | None = None) -> bytes:
    """Change fields of the format of a WAV file."""
    old = struct.unpack_from("<IHH", wav, 28)
    fields = struct.pack(
        "<IHH", old[0] if bytes_per_s is None else bytes_per_s, block, old[2] if bits is None else bits
    )
    return wav[:28] + fields + wav[36:]


def test_24_bits_in_containers_of_32_bits_equal_packed_samples():
    found, packed = (decode((FILMS / name).read_bytes()) for name in ("valid_24_of_32.wav", "plain_24.wav"))
    assert np.array_equal(found, packed)


def test_valid_bits_count_in_other_containers_of_the_format():
    data = encode_with_ffmpeg(tone(0.5, channels=6), RATE, "w64", "pcm_s32le", "5.1")
    extensible = data.find(struct.pack("<HHI", 22, 32, 0x3F))
    assert extensible > 0
    changed = bytearray(data)
    changed[extensible + 2] = 24
    assert np.array_equal(decode(bytes(changed)), decode(data))


def encode_extensible(samples: np.ndarray, container: int, valid: int) -> bytes:
    """Encode float32 [samples, 2] as a WAV file with left-justified samples of `valid` bits."""
    bits, width = min(valid or container, container), container // 8
    numbers = np.rint(samples * (2 ** (bits - 1) - 1)).astype("<i8") << (container - bits)
    numbers += 128 if container == 8 else 0
    data = numbers.reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    head = struct.pack("<HHIIHHHHIH", 0xFFFE, 2, RATE, RATE * 2 * width, 2 * width, container, 22, valid, 3, 1)
    head += bytes.fromhex("000000001000800000aa00389b71")
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_big_endian_files_are_equal_to_the_reference(subtype, channels):
    data = big_endian(tone(0.3, channels=channels), subtype)
    assert np.array_equal(decode(data), reference(data))


@pytest.mark.parametrize("endian", ["LITTLE", "BIG"])
def test_the_byte_order_of_aiff_is_kept(endian):
    file = io.BytesIO()
    soundfile.write(file, tone(0.3), RATE, format="AIFF", subtype="PCM_16", endian=endian)
    assert (b"sowt" in file.getvalue()) == (endian == "LITTLE")
    assert np.array_equal(decode(file.getvalue()), reference(file.getvalue()))


def test_a_big_endian_file_with_other_codecs_is_refused():
    with pytest.raises(MediaError, match="RIFX file has samples with the codec 2 of 4 bits; supported: PCM"):
        decode(big_endian(tone(0.3), "MS_ADPCM"))


CONTAINERS_WITH_LENGTH = {
    **{name: (encode_audio, RATE, name, "PCM_16") for name in ("WAV", "RF64", "W64", "AIFF", "AU", "NIST", "CAF")},
    "WAVEX": (encode_audio, RATE, "WAVEX", "PCM_24"),
    "W64 with a fact": (encode_audio, RATE, "W64", "ULAW"),
    "W64 of blocks": (encode_audio, RATE, "W64", "IMA_ADPCM"),
    "CAF of floats": (encode_audio, RATE, "CAF", "FLOAT"),
    "AVI": (encode_with_ffmpeg, RATE, "avi", "pcm_s16le"),
    "AVI of MP3": (encode_with_ffmpeg, 48_000, "avi", "libmp3lame"),
    "FLV": (encode_with_ffmpeg, 44_100, "flv", "libmp3lame"),
    "MP3": (encode_audio, RATE, "MP3", "MPEG_LAYER_III"),
    "Matroska": (encode_with_ffmpeg, RATE, "matroska", "libmp3lame"),
    "WebM": (encode_with_ffmpeg, 48_000, "webm", "libopus"),
}


@pytest.mark.parametrize("name", CONTAINERS_WITH_LENGTH)
def test_a_truncated_file_is_refused(name):
    encode, rate, *form = CONTAINERS_WITH_LENGTH[name]
    data = encode(tone(3.0, rate), rate, *form)
    whole = decode(data)
    assert len(whole) == pytest.approx(3.0 * RATE, abs=0.1 * RATE)
    with pytest.raises(
        MediaError, match=r"the audio clip is truncated: its header declares [23]\.\d s, but it has 1\.\d s"
    ):
        decode(data[: len(data) // 2])
    assert len(decode(data[: len(data) * 97 // 100])) <= len(whole), "a damaged end may be missing, as of a video"


def big_endian(samples: np.ndarray, subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype=subtype, endian="BIG")
    assert file.getvalue().startswith(b"RIFX")
    return file.getvalue()


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "ULAW"])
def test_a_truncated_big_endian_file_is_refused(subtype):
    data = big_endian(tone(3.0), subtype)
    with pytest.raises(MediaError, match=r"its header declares 3\.0 s, but it has 1\.5 s"):
        decode(data[: len(data) // 2])
    assert 2.8 * RATE < len(decode(data[: len(data) * 97 // 100])) < 3.0 * RATE


def test_a_truncated_rf64_file_that_states_no_number_of_samples_is_refused():
    data = encode_audio(tone(3.0), RATE, "RF64")
    at = data.index(b"ds64") + 24
    data = data[:at] + bytes(8) + data[at + 8 :]
    assert len(decode(data)) == 3 * RATE
    with pytest.raises(MediaError, match=r"its header declares 3\.0 s, but it has 1\.5 s"):
        decode(data[: len(data) // 2])


def test_a_flac_that_is_truncated_between_two_frames_is_refused():
    data = encode_audio(tone(3.0), RATE, "FLAC")
    with av.open(io.BytesIO(data)) as container:
        places = [packet.pos for packet in container.demux() if packet.pos is not None]
    with pytest.raises(MediaError, match=r"its header declares 3\.0 s, but it has 1\.\d s"):
        decode(data[: places[len(places) // 2]])


def test_a_size_that_a_writer_of_wave64_did_not_know_is_ignored():
    data = encode_audio(tone(0.5), RATE, "W64")
    at = data.index(b"data") + 16
    changed = data[:at] + struct.pack("<Q", 0x7FFFFFFF << 32) + data[at + 8 :]
    assert np.array_equal(decode(changed), decode(data))


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_a_writer_of_caf_did_not_know_is_ignored(size):
    data = encode_audio(tone(0.5), RATE, "CAF")
    at = data.index(b"data") + 4
    changed = data[:at] + struct.pack(">q", size) + data[at + 8 :]
    assert np.array_equal(decode(changed), decode(data))


def test_a_whole_avi_with_a_false_number_of_samples_is_decoded():
    data = encode_with_ffmpeg(tone(1.0), RATE, "avi", "pcm_s16le")
    at = data.index(b"strh") + 8 + 32
    assert struct.unpack_from("<I", data, at) == (RATE,)
    for false in (0, 1, 2 * RATE, 2**32 - 1):
        assert len(decode(data[:at] + struct.pack("<I", false) + data[at + 4 :])) == RATE


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_a_size_that_a_writer_did_not_know_is_ignored(size):
    data = encode_audio(tone(0.5), RATE)
    at = data.index(b"data") + 4
    assert np.array_equal(decode(data[:at] + struct.pack("<I", size) + data[at + 4 :]), decode(data))


def test_the_audio_of_a_longer_film_is_complete():
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        images, stream = output.add_stream("libx264", rate=2), output.add_stream("pcm_s16le", rate=RATE, layout="mono")
        images.width, images.height, images.pix_fmt = 112, 84, "yuv420p"
        for pixels in moving_frames(20):
            output.mux(images.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(images.encode())
        frame = av.AudioFrame.from_ndarray(np.ones((1, RATE), np.int16), format="s16", layout="mono")
        frame.sample_rate = RATE
        output.mux([*stream.encode(frame), *stream.encode()])
    assert len(decode(file.getvalue())) == RATE


LYRICS = b"LYRICSBEGININD0000200" + b"000021LYRICS200" + b"TAG" + bytes(125)


@pytest.mark.parametrize("behind", [b"\0", bytes(4096), b"helloworld", LYRICS])
def test_bytes_after_an_mp3_are_ignored(behind):
    data = encode_audio(tone(2.0, 44_100), 44_100, "MP3", "MPEG_LAYER_III")
    whole = open_audio(data).decode(44_100, 10**6)
    found = open_audio(data + behind).decode(44_100, 10**6)
    assert np.array_equal(found[: len(whole)], whole)
    assert len(found) - len(whole) < 1152, "at most the padding of one frame may be added"
    expected = load_audio(f"data:;base64,{base64.b64encode(data + behind).decode()}", 44_100, backend="soundfile")
    assert np.abs(found[: len(expected)] - expected).max() < 1e-5


@pytest.mark.parametrize(("container", "codec", "frame"), [("mp3", "mp3", 1152), ("adts", "aac", 1024)])
def test_a_stream_without_a_container_continues_after_damage(container, codec, frame):
    data = encode_with_ffmpeg(tone(2.0, 48_000), 48_000, container, codec)
    whole = open_audio(data).decode(48_000, 10**6)
    for damaged in (data[:-100], data[:9000] + b"junk" * 80 + data[9000:], data + data):
        found = open_audio(damaged).decode(48_000, 10**6)
        assert len(found) > len(whole) - 5 * frame
    assert len(found) > 1.9 * len(whole), "both copies must be decoded, one after the other"


def test_a_damaged_file_in_a_container_is_refused():
    data = bytearray(encode_with_ffmpeg(tone(2.0, 48_000), 48_000, "mp4", "aac"))
    data[9000:9200] = b"junk" * 50
    with pytest.raises(MediaError, match=r"the audio clip is broken: only [0-9]+ samples could be decoded"):
        decode(bytes(data))


def test_given_samples_are_resampled_from_their_rate():
    samples = tone(1.0, 48_000)
    assert np.array_equal(open_audio(samples).decode(RATE, 48_000), samples)
    data = encode_audio(samples, 48_000, "WAV", "FLOAT")
    assert np.array_equal(open_audio(samples, 48_000).decode(RATE, 60 * RATE), reference(data))
    with pytest.raises(InputError, match="sampling_rate is 16000, but an encoded clip has its own rate"):
        open_audio(data, 16_000)


def test_only_one_dimensional_float_arrays_are_samples():
    (media,) = parse_inputs([{"audio": tone(0.1).astype(np.float64), "sampling_rate": 8000}])
    assert isinstance(media, Media)
    assert media.options.sampling_rate == 8000
    assert read_source(media).dtype == np.float32
    for wrong in (np.zeros((2, 5), np.float32), np.zeros(5, np.int16), np.zeros(0, np.float32)):
        with pytest.raises(InputError, match=r"audio samples have .*; they must be float values of shape \[samples\]"):
            read_source(Media("audio", wrong))


def test_caps_are_checked_before_decoding():
    data = encode_audio(tone(3.0), RATE)
    with (
        under(MediaCaps(max_audio_seconds=2.5)),
        pytest.raises(LimitExceeded, match=r"lasts 3\.0 s; the limit is 2\.5 s"),
    ):
        EncodedAudio.open(data)
    for rate in (999, 768_001):
        with pytest.raises(LimitExceeded, match=f"sampling rate of {rate} Hz; it must be from 1000 to 768000"):
            open_audio(wav_header(rate, 1) + bytes(100))
    with pytest.raises(LimitExceeded, match="65 channels; the limit is 64"):
        open_audio(wav_header(RATE, 65) + bytes(65 * 200))


@pytest.mark.parametrize(
    ("data", "rate"),
    [
        (encode_audio(tone(0.2), RATE, "CAF"), struct.pack(">d", RATE)),
        (encode_with_ffmpeg(tone(0.2), RATE, "mov", "pcm_s16le"), struct.pack(">I", RATE << 16)),
        (encode_with_ffmpeg(tone(0.2), RATE, "matroska", "pcm_s16le"), struct.pack(">d", RATE)),
    ],
    ids=["caf", "mov", "matroska"],
)
def test_audio_without_a_sampling_rate_is_refused(data: bytes, rate: bytes):
    assert rate in data
    with pytest.raises(MediaError, match=r"audio stream of the file has no sampling rate"):
        open_audio(data.replace(rate, bytes(len(rate))))


def test_a_small_file_that_claims_hours_of_audio_is_refused():
    silence = encode_with_ffmpeg(np.zeros(20 * 48_000, np.float32), 48_000, "ogg", "libopus")
    last = bytearray(silence[silence.rindex(b"OggS") :])  # the last page contains the number of samples of the file
    last[6:14] = struct.pack("<q", 48_000 * 3600 * 5)
    last[22:26] = bytes(4)
    last[22:26] = struct.pack("<I", ogg_check(last))
    claim = silence[: -len(last)] + bytes(last)
    assert len(claim) < 10_000
    with pytest.raises(LimitExceeded, match=r"lasts 1[78]\d\d\d\.\d s; the limit is 14400 s"):
        open_audio(claim)


def test_decoding_stops_at_the_cap_of_samples():
    with (
        under(MediaCaps(max_audio_samples=RATE)),
        pytest.raises(LimitExceeded, match="more samples than the limit of 16000"),
    ):
        decode(encode_audio(tone(3.0), RATE))


def test_a_clip_is_decoded_under_the_caps_it_was_opened_with(monkeypatch):
    limits = []

    def recorded(data: bytes, formats: Sequence[str], max_pixels: int) -> InputContainer:
        limits.append(max_pixels)
        return open_container(data, formats, max_pixels)

    monkeypatch.setattr(audio, "open_container", recorded)
    data = encode_audio(tone(3.0), RATE)
    with under(MediaCaps(max_video_pixels=77, max_audio_samples=3 * RATE)):
        clip = open_audio(data)
    with under(MediaCaps(max_audio_samples=RATE)):
        assert len(clip.decode(RATE, 60 * RATE)) == 3 * RATE
    assert limits == [77, 77]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e12])
def test_samples_that_overflow_are_refused(value):
    samples = tone(0.5)
    samples[77] = value
    with pytest.raises(MediaError, match=r"has a sample of amplitude (nan|inf|9999.*); the limit is 1e\+09"):
        decode(encode_audio(samples, RATE, "WAV", "FLOAT"))
    with pytest.raises(MediaError, match="has a sample of amplitude"):
        open_audio(samples).decode(RATE, RATE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no audio",
        b"RIFF\x00\x00\x00\x00WAVE",
        b"OggS" + bytes(200),
        b"ID3\x04\x00\x00\x00\x00\x00\x00" + bytes(200),
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n",
        b"ffconcat version 1.0\nfile '/etc/hostname'\n",
        np.random.default_rng(0).bytes(5000),
    ],
)
def test_data_without_audio_is_refused(data):
    with pytest.raises((MediaError, LimitExceeded)):
        decode(data)


def test_an_unknown_codec_is_refused():
    data = bytearray(encode_audio(tone(0.1), RATE))
    at = data.index(b"fmt ") + 8
    data[at : at + 2] = b"\x99\x99"
    with pytest.raises(MediaError, match=r"unknown codec|no readable"):
        open_audio(bytes(data))


def test_a_clip_without_samples_is_refused():
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
    with pytest.raises(MediaError, match=r"no samples|no readable"):
        decode(file.getvalue())


def ogg_check(page: bytes) -> int:
    """Return the CRC-32 of an Ogg page whose checksum field is zero."""
    check = 0
    for byte in page:
        check ^= byte << 24
        for _ in range(8):
            check = (check << 1) ^ (0x104C11DB7 if check >> 31 else 0)
    return check


def wav_header(rate: int, channels: int) -> bytes:
    """Return the header of a WAV file with 8-bit samples."""
    return (
        b"RIFF" + struct.pack("<I", 10_000) + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * channels, channels, 8)
        + b"data" + struct.pack("<I", 9_000)
    )  # fmt: skip
