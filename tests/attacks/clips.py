"""Malicious videos, audio clips and playlists, each as a function that returns the file's bytes."""

from __future__ import annotations

import io
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction

import av
import numpy as np
from PIL import Image

from tests.audio_samples import encode_audio, encode_with_ffmpeg, tone
from tests.media_samples import encode_video, encoded, moving_frames, video_packets
from tests.transport_samples import lists

Make = Callable[[], bytes]
RATE = 16_000


def box(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", 8 + len(data)) + kind + data


def video(container: str = "mp4", codec: str = "libx264") -> bytes:
    return encode_video(moving_frames(6), container=container, codec=codec)


def video_of_program() -> bytes:
    return encode_video(moving_frames(6), fps=25, container="mpeg", codec="mpeg1video")


def caf(chunk: bytes = b"") -> bytes:
    """Return ALAC audio in a CAF file. If given, `chunk` replaces the packet table."""
    data = encode_audio(tone(0.1, RATE), RATE, "CAF", "ALAC_16")
    at = data.index(b"pakt")
    return data[:at] + (chunk or data[at:])


def patched(data: bytes, kind: bytes, offset: int, value: bytes) -> bytes:
    """Return `data` with `value` written at byte `offset` of the content of the first box of type `kind`."""
    at = data.index(kind) + 4 + offset
    return data[:at] + value + data[at + len(value) :]


def mp4_of_samples(size: int, count: int) -> bytes:
    """Return an MP4 whose sample table declares `count` samples of `size` bytes each."""
    return patched(video(), b"stsz", 4, struct.pack(">II", size, count))


def compressed_index() -> bytes:
    """Return an MP4 whose index declares 2 * 10**7 samples and is compressed as in QuickTime 3."""
    data = mp4_of_samples(1, 2 * 10**7)
    at = data.index(b"moov") - 4
    packed = struct.pack(">I", len(data) - at) + zlib.compress(data[at:])
    return data[:at] + box(b"moov", box(b"cmov", box(b"dcom", b"zlib") + box(b"cmvd", packed)))


def pcm_of_chunks(count: int) -> bytes:
    """Return a MOV of PCM audio whose only chunk declares `count` samples. FFmpeg splits such a chunk into pieces."""
    audio = encode_with_ffmpeg(tone(0.1, 8000), 8000, "mov", "pcm_s16le")
    return patched(audio, b"stsc", 12, struct.pack(">I", count))


def edited(count: int) -> bytes:
    """Return an MP4 of 2000 frames whose edit list shows all frames `count` times."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for _ in range(2000):
            output.mux(stream.encode(av.VideoFrame(16, 16, "yuv420p")))
        output.mux(stream.encode())
    data = file.getvalue()
    at = data.index(b"edts") - 4
    size = int.from_bytes(data[at : at + 4])
    edits = box(b"edts", box(b"elst", struct.pack(">II", 0, count) + struct.pack(">III", 10**5, 0, 2**16) * count))
    for kind in (b"trak", b"moov"):
        place = data.index(kind)
        longer = int.from_bytes(data[place - 4 : place]) + len(edits) - size
        data = data[: place - 4] + struct.pack(">I", longer) + data[place:]
    return data[:at] + edits + data[at + size :]


def fragment_in_data(count: int, aligned: bool = False) -> bytes:
    """Return a fragmented MP4 whose media data contain a hidden fragment of `count` samples.

    The segment index points to the hidden fragment. If `aligned`, it points only to the real fragment.
    """
    data = muxed("mp4", {"movflags": "frag_keyframe+empty_moov"})
    begin, stop = data.index(b"moof") - 4, data.index(b"mfra") - 4
    run = box(b"trun", struct.pack(">II", 0, count))
    hidden = box(
        b"moof", box(b"mfhd", bytes(8)) + box(b"traf", box(b"tfhd", struct.pack(">III", 0x020010, 1, 1)) + run)
    )
    hidden = box(b"mdat", bytes(8) + hidden)
    true = data[begin:stop]
    places = [len(true) + len(hidden)] if aligned else [len(true) + 16, len(hidden) - 16]
    entries = b"".join(struct.pack(">III", place, 10, 0) for place in places)
    index = box(b"sidx", struct.pack(">IIIIIHH", 0, 1, 10, 0, 0, 0, len(places)) + entries)
    return data[:begin] + index + true + hidden


def past_the_end(count: int) -> bytes:
    """Return an MP4 whose sample entry ends after the index, so that FFmpeg also reads a table of `count` samples."""
    data = muxed("mp4", {"movflags": "faststart"}).replace(b"stsz", b"zzzz")
    data = patched(data, b"stsd", 8, struct.pack(">I", 2**30))
    at = data.index(b"moov")
    stop = at - 4 + int.from_bytes(data[at - 4 : at])
    over = struct.pack(">I4s", 16, b"zzzz")  # ends after the index, but within the sample entry
    table = box(b"mdat", box(b"stsz", struct.pack(">III", 0, 1, count)))
    return data[: at - 4] + struct.pack(">I", stop - at + 12) + data[at:stop] + over + table + data[stop:]


def grouped(count: int) -> bytes:
    """Return an MP4 with a sample group that declares `count` frames."""
    data = video(codec="libx265")
    group = box(b"sgpd", struct.pack(">I4sIIB", 2**24, b"sync", 1, 1, 21))
    group += box(b"sbgp", struct.pack(">I4sIII", 0, b"sync", 1, count, 1))
    at = data.index(b"stbl") + 4
    data = data[:at] + group + data[at:]
    for kind in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        place = data.index(kind)
        longer = int.from_bytes(data[place - 4 : place]) + len(group)
        data = data[: place - 4] + struct.pack(">I", longer) + data[place:]
    return data


def fragmented(count: int) -> bytes:
    """Return a fragmented MP4 whose first fragment declares `count` samples of the default size."""
    data = muxed("mp4", {"movflags": "frag_keyframe+empty_moov"})
    run = box(b"trun", struct.pack(">II", 0, count))
    header = box(b"tfhd", struct.pack(">III", 0x020000, 1, 0))
    fragment = box(b"moof", box(b"mfhd", bytes(8)) + box(b"traf", header + run))
    return data[: data.index(b"moof") - 4] + fragment + box(b"mdat", bytes(10))


def muxed(container: str, options: dict[str, str]) -> bytes:
    """Return four frames that FFmpeg has muxed into `container`.

    The muxer writes to a temporary file, because some `options` require a real file.
    """
    with tempfile.NamedTemporaryFile() as file:
        with av.open(file.name, "w", format=container, options=options) as output:
            stream = output.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
            for frame in moving_frames(4):
                output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            output.mux(stream.encode())
        return file.read()


def samples_of_the_same_bytes(count: int) -> bytes:
    """Return an MP4 with `count` samples that all refer to the same megabyte of data."""
    data = video()
    size, times = 2**20, struct.pack(">IIII", 0, 1, count, 1)
    boxes = {
        b"stts": times,
        b"stsc": struct.pack(">IIIII", 0, 1, 1, 1, 1),
        b"stsz": struct.pack(">III", 0, 0, count) + struct.pack(">I", size) * count,
        b"stco": struct.pack(">II", 0, count) + struct.pack(">I", 48) * count,
    }
    for kind, content in boxes.items():
        at = data.index(kind) - 4
        more = box(kind, content)
        longer = len(more) - int.from_bytes(data[at : at + 4])
        data = data[:at] + more + data[at + len(more) - longer :]
        for outer in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
            place = data.index(outer)
            data = (
                data[: place - 4] + struct.pack(">I", int.from_bytes(data[place - 4 : place]) + longer) + data[place:]
            )
    at = data.index(b"moov") - 4
    return box(b"ftyp", b"isom\0\0\0\0isomiso2avc1mp41") + box(b"mdat", bytes(size + 100)) + data[at:]


def element(name: str, *content: bytes, size: int | None = None) -> bytes:
    """Return a Matroska element with a hexadecimal id. `size` replaces the size that the element declares."""
    data = b"".join(content)
    return bytes.fromhex(name) + (len(data) if size is None else size).to_bytes(8).replace(b"\0", b"\1", 1) + data


def compressed(algorithm: int = 0, prefix: bytes | None = None) -> bytes:
    """Return the element that declares the blocks of a Matroska track as compressed."""
    settings = [] if prefix is None else [element("4255", prefix)]
    return element("6d80", element("6240", element("5034", element("4254", bytes([algorithm])), *settings)))


def matroska_track(number: int, codec: bytes, *more: bytes, kind: int = 1) -> bytes:
    """Return the entry of a track in a Matroska file. Video tracks (`kind` 1) have 64 x 64 pixels."""
    size = element("e0", element("b0", b"\x40"), element("ba", b"\x40")) if kind == 1 else b""
    named = element("d7", bytes([number])) + element("73c5", bytes([number])) + element("83", bytes([kind]))
    return element("ae", named, element("86", codec), size, *more)


def matroska(tracks: bytes, blocks: Sequence[tuple[int, bytes]], more: bytes = b"") -> bytes:
    """Return a Matroska file.

    `blocks` lists pairs of a track number and data. Each block is in its own cluster, one millisecond after the
    previous block. The elements `more` precede the clusters.
    """
    head = element("1a45dfa3", element("4282", b"matroska"))
    info = element("1549a966", element("2ad7b1", (10**6).to_bytes(3)))
    clusters = (
        element("1f43b675", element("e7", at.to_bytes(3)), element("a3", bytes([0x80 | number, 0, 0, 0x80]), data))
        for at, (number, data) in enumerate(blocks)
    )
    return head + element("18538067", info, element("1654ae6b", tracks), more, *clusters)


def vp8(num_frames: int = 3) -> list[bytes]:
    """Return encoded VP8 frames of 64 x 64 pixels."""
    return video_packets(encode_video(moving_frames(num_frames, 64, 64), container="webm", codec="libvpx"))


def unpacking(valid: bool = True) -> bytes:
    """Return 9 KB of zlib data that unpack to 9 MB. If not `valid`, FFmpeg notices the error only at the end."""
    packed = zlib.compress(bytes(9_500_000), 9)
    return packed if valid else packed[:-4] + bytes(4)


def motion_jpeg(num_scans: int, container: str = "avi") -> bytes:
    """Return two JPEG frames of 4000 x 4000 pixels with `num_scans` additional scans each."""
    image = encoded(Image.new("L", (4000, 4000), 128), progressive=True, quality=50)
    scan = image[image.rindex(b"\xff\xda") : -2]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 4000, 4000, "yuvj420p"
        for at in range(2):
            packet = av.Packet(image[:-2] + scan * num_scans + image[-2:])
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, at, at, Fraction(1, 10)
            packet.is_keyframe = True
            output.mux(packet)
    return file.getvalue()


def large_video(width: int, height: int, codec: str = "mpeg4") -> bytes:
    """Return a small file whose only frame really has `width` x `height` pixels."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream(codec, rate=1)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def slow_video(seconds: int) -> bytes:
    """Return a video of two frames that are `seconds` apart."""
    return _timed([0, seconds])


def _timed(seconds: list[int]) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=1)
        stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
        for at, pixels in zip(seconds, moving_frames(len(seconds)), strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = at
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def reference_film(url: bytes) -> bytes:
    """Return a QuickTime reference movie, which only contains the URL of another movie."""
    rdrf = box(b"rdrf", bytes(4) + b"url " + struct.pack(">I", len(url)) + url)
    return box(b"ftyp", b"qt  \0\0\0\0qt  ") + box(b"moov", box(b"rmra", box(b"rmda", rdrf)))


def nested(depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = box(b"moov", data)
    return box(b"ftyp", b"isom\0\0\0\0isom") + data


def wav_header(rate: int, channels: int, bits: int = 16, tag: int = 1, num_bytes: int = 1000) -> bytes:
    align = channels * bits // 8
    head = struct.pack("<HHIIHH", tag, channels, rate, rate * align & 0xFFFFFFFF, align & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", num_bytes) + bytes(1000)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def ogg_check(page: bytes) -> int:
    """Return the checksum of an Ogg page whose checksum field is zero."""
    check = 0
    for byte in page:
        check ^= byte << 24
        for _ in range(8):
            check = (check << 1) ^ (0x04C11DB7 if check & 0x80000000 else 0)
        check &= 0xFFFFFFFF
    return check


def ogg_of(seconds: int) -> bytes:
    """Return an Ogg file with one second of silence, whose last page declares that the file ends after `seconds`."""
    silence = encode_with_ffmpeg(np.zeros(48_000, np.float32), 48_000, "ogg", "libopus")
    last = bytearray(silence[silence.rindex(b"OggS") :])
    last[6:14] = struct.pack("<q", 48_000 * seconds)
    last[22:26] = bytes(4)
    last[22:26] = struct.pack("<I", ogg_check(bytes(last)))
    return silence[: -len(last)] + bytes(last)


def flac_of(num_samples: int) -> bytes:
    """Return a FLAC whose header declares `num_samples` samples."""
    data = bytearray(encode_audio(tone(0.2), RATE, "FLAC"))
    packed = int.from_bytes(data[18:26]) >> 36 << 36 | num_samples
    data[18:26] = packed.to_bytes(8)
    return bytes(data)


def loud(value: float) -> bytes:
    samples = tone(0.2)
    samples[7] = value
    return encode_audio(samples, RATE, "WAV", "FLOAT")


NAMING: dict[str, Make] = {
    "hls of a file": lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "hls of an address": lambda: b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n",
    "hls with a key": lambda: b'#EXTM3U\n#EXT-X-KEY:METHOD=AES-128,URI="file:///etc/passwd"\n#EXTINF:1,\na.ts\n',
    "hls of a part of a file": lambda: b"#EXTM3U\n#EXTINF:1,\nsubfile,,start,0,end,9,,:/etc/passwd\n",
    "hls behind an avi's head": lambda: b"RIFF\xff\xff\0\0AVI #EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "gab2 subtitles in an avi": lambda: (
        b"RIFF\xff\0\0\0AVI LIST\xf0\0\0\0moviGAB2\0\2\0\0\0\0\0#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\n"
        b"concat:/etc/passwd|/etc/hosts\n"
    ),
    "concat": lambda: b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    "dash": lambda: (
        b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet>'
        b"<Representation><BaseURL>file:///etc/passwd</BaseURL></Representation></AdaptationSet></Period></MPD>"
    ),
    "smooth streaming": lambda: b'<SmoothStreamingMedia><StreamIndex Url="file:///etc/passwd"/></SmoothStreamingMedia>',
    "session description": lambda: b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    "pls": lambda: b"[playlist]\nFile1=file:///etc/passwd\nNumberOfEntries=1\n",
    "asx": lambda: b'<asx version="3.0"><entry><ref href="file:///etc/passwd"/></entry></asx>',
    "xspf": lambda: b'<playlist xmlns="http://xspf.org/ns/0/"><trackList><track><location>file:///etc/passwd',
    "smil": lambda: b'<smil><body><video src="file:///etc/passwd"/></body></smil>',
    "asf redirector": lambda: b"[Reference]\nRef1=http://127.0.0.1:1/a?MSWMExt=.asf\n",
    "rtsp text": lambda: b"rtsptextrtsp://127.0.0.1:1/x\n",
    "srt subtitles": lambda: b"1\n00:00:00,000 --> 00:00:01,000\n<img src=file:///etc/passwd>\n",
    "ass subtitles": lambda: b"[Script Info]\nVideo File: /etc/passwd\n[Events]\nDialogue: 0,0:00:00.00\n",
    "vobsub index": lambda: b"# VobSub index file, v7\nsize: 720x576\nid: en, index: 0\n",
    "image list": lambda: b"/etc/passwd\n/etc/hosts\n" * 20,
    "image magick text": lambda: b"id=ImageMagick class=DirectClass\ncolumns=9 rows=9\n\x0c\n:\x1a" + bytes(300),
    "lavfi": lambda: b"movie=/etc/passwd",
    "metadata": lambda: b";FFMETADATA1\ntitle=file:///etc/passwd\n",
    "a film that is elsewhere": lambda: reference_film(b"file:///etc/passwd\0"),
    "a film that is at an address": lambda: reference_film(b"http://127.0.0.1:1/x.mov\0"),
}
"""Files that try to make a media library open other files or addresses, which the client has chosen."""

GIF = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"
"""A GIF of one pixel."""

VIDEO_BOMBS: dict[str, Make] = {
    "gif of 65535x65535": lambda: GIF.replace(b"GIF89a\1\0\1\0", b"GIF89a\xff\xff\xff\xff"),
    "mpeg4 8000x6000 in truth": lambda: large_video(8000, 6000),
    "mp4 of 2**32 samples of a byte": lambda: mp4_of_samples(1, 2**32 - 1),
    "mp4 of 5 * 10**7 samples of a byte": lambda: mp4_of_samples(1, 5 * 10**7),
    "mp4 of 2**16 samples of 2**16 bytes": lambda: mp4_of_samples(2**16, 2**16),
    "mp4 of 10**8 samples in a table": lambda: mp4_of_samples(0, 10**8),
    "mp4 fragment of 2**32 samples": lambda: fragmented(2**32 - 1),
    "mp4 fragment of 5 * 10**7 samples": lambda: fragmented(5 * 10**7),
    "mp4 of 2 * 10**7 samples behind a box of junk": lambda: box(b"junk", b"") + mp4_of_samples(1, 2 * 10**7),
    "mp4 of 2 * 10**7 samples in another box": lambda: mp4_of_samples(1, 2 * 10**7).replace(b"stbl", b"dinf"),
    "mp4 of 2 * 10**7 samples, compressed": compressed_index,
    "mp4 of 2 * 10**7 samples in its data": lambda: fragment_in_data(2 * 10**7),
    "mp4 of 2 * 10**7 samples past the index's end": lambda: past_the_end(2 * 10**7),
    "mp4 of a group of 2 * 10**7 frames": lambda: grouped(2 * 10**7),
    "mp4 of 8000 edits of 2000 frames": lambda: edited(8000),
    "two frames in ten hours": lambda: slow_video(36_000),
    "mp4 of 20000 samples of the same 2**20 bytes": lambda: samples_of_the_same_bytes(20_000),
    "matroska of 300 blocks that unpack to 9 MB": lambda: matroska(
        matroska_track(1, b"V_VP8", compressed()), [(1, unpacking())] * 300
    ),
    "matroska of 300 blocks that fail to unpack to 9 MB": lambda: matroska(
        matroska_track(1, b"V_VP8", compressed()), [(1, zlib.compress(vp8()[0]))] + [(1, unpacking(valid=False))] * 300
    ),
    "matroska of 20000 blocks that each begin with 5 MB": lambda: matroska(
        matroska_track(1, b"V_VP8", compressed(3, bytes(5_000_000))), [(1, b"\0")] * 20_000
    ),
    "transport stream of 20000 programs": lambda: video("mpegts", "mpeg2video") + lists(480),
    "motion jpeg of 1500 scans in avi": lambda: motion_jpeg(1500),
    "motion jpeg of 1500 scans in mov": lambda: motion_jpeg(1500, "mov"),
}
BROKEN_VIDEOS: dict[str, Make] = {
    "mp4 cut": lambda: video()[:900],
    "mp4 of its type alone": lambda: video()[:32],
    "mp4 without pixels": lambda: video().replace(b"mdat", b"mdax")[:200],
    "mp4 without its index": lambda: video().replace(b"moov", b"moox"),
    "mp4 box of 2**63 bytes": lambda: box(b"ftyp", b"isom") + struct.pack(">I", 1) + b"moov" + struct.pack(">Q", 2**63),
    "mp4 box of 4 bytes": lambda: box(b"ftyp", b"isom") + struct.pack(">I", 4) + b"moov" + bytes(50),
    "mp4 of 10000 boxes one in another": lambda: nested(10_000),
    "mp4 of a codec nobody knows": lambda: video().replace(b"avc1", b"zzz1"),
    "mp4 of no time scale": lambda: patched(video(), b"mdhd", 12, bytes(4))[:500],
    "matroska cut": lambda: video("matroska")[:300],
    "matroska of a huge element": lambda: video("matroska")[:60] + b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xfe",
    "avi cut": lambda: video("avi", "mpeg4")[:2000],
    "avi whose list is too long": lambda: b"RIFF\xff\xff\xff\xffAVI LIST\xff\xff\xff\xffhdrl" + bytes(100),
    "program stream of its packs alone": lambda: video_of_program()[:14] * 3000,
    "program stream of another codec": lambda: video_of_program().replace(b"\0\0\1\xb3", b"\0\0\1\xb9"),
    "flv of its head alone": lambda: b"FLV\1\5\0\0\0\x09\0\0\0\0" + bytes(100),
    "transport stream of nothing": lambda: (b"\x47\x1f\xff\x10" + bytes(184)) * 50,
    "asf of its head alone": lambda: b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\0\xaa\0\x62\xce\x6c" + b"\xff" * 50,
    "jpeg2000 in a mov": lambda: video("mov", "jpeg2000"),
    "gif with only its header": lambda: GIF[:19],
    "ivf with only its header": lambda: video("ivf", "libvpx")[:32],
    "ogg with invalid theora": lambda: b"OggS\0\2" + bytes(20) + b"\1\x2a\x80theora\3\2\1" + b"\xff" * 32,
    "audio alone": lambda: encode_with_ffmpeg(tone(0.2, 48_000), 48_000, "ipod", "aac"),
    "noise": lambda: np.random.default_rng(0).bytes(20_000),
}

AUDIO_BOMBS: dict[str, Make] = {
    "wav of 2**32 samples a second": lambda: wav_header(2**32 - 1, 1),
    "wav of 1 sample a second": lambda: wav_header(1, 1),
    "mov of a chunk of 2**32 samples": lambda: pcm_of_chunks(2**32 - 1),
    "wav of 65 channels": lambda: wav_header(RATE, 65),
    "wav of 65535 channels": lambda: wav_header(RATE, 65_535),
    "ogg of five hours by its last page": lambda: ogg_of(5 * 3600),
    "ogg of 2**40 seconds": lambda: ogg_of(2**40),
    "flac of 2**36 samples": lambda: flac_of(2**36 - 1),
    "wav that is not a number": lambda: loud(np.nan),
    "wav that is infinite": lambda: loud(np.inf),
    "wav of 10**30": lambda: loud(1e30),
}
BROKEN_AUDIO: dict[str, Make] = {
    "wav of no channels": lambda: wav_header(RATE, 0),
    "wav of no samples": lambda: wav_header(RATE, 1)[:44],
    "wav of a codec nobody knows": lambda: wav_header(RATE, 1, tag=0x9999),
    "wav of its head alone": lambda: b"RIFF\0\0\0\0WAVE",
    "flac of its head alone": lambda: b"fLaC" + bytes(60),
    "ogg of nothing": lambda: b"OggS" + bytes(300),
    "mp3 of its tag alone": lambda: b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(300),
    "m4a without its index": lambda: encode_with_ffmpeg(tone(0.2, 48_000), 48_000, "ipod", "aac").replace(
        b"moov", b"moox"
    ),
    "a video without audio": video,
    "caf of its head alone": lambda: caf()[:52],
    "caf of a chunk of 2**63 bytes": lambda: caf().replace(b"data\0", b"kuki\x7f"),
    "caf of 2**31 packets": lambda: caf(b"pakt" + struct.pack(">qqqii", 24, 2**31 - 1, 2**40, 0, 0)),
    "w64 of its head alone": lambda: encode_audio(tone(0.1, RATE), RATE, "W64")[:64],
    "w64 whose format has 2**31 bytes": lambda: patched(
        encode_audio(tone(0.1, RATE), RATE, "W64"), b"fmt ", 12, struct.pack("<q", 2**31 - 8)
    ),
    "midi": lambda: b"MThd\0\0\0\6\0\1\0\1\0\x60MTrk\0\0\0\4\0\xff\x2f\0",
    "noise": lambda: np.random.default_rng(1).bytes(20_000),
}


def long_audio() -> bytes:
    """Return ten minutes of silence as a FLAC of a few kilobytes, which decodes to 110 MB of samples."""
    return encode_audio(np.zeros(48_000 * 600, np.float32), 48_000, "FLAC")
