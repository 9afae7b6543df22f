"""Tests for MindIE's wire format: words, segments, and errors in cases where MindIE returns wrong results."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindie_mm.errors import (
    BadReference,
    CorruptReference,
    InputError,
    LimitExceeded,
    SegmentMissing,
    SharedMemoryError,
)
from mindie_mm.shm import Arena, ArraySpec, Ref, release
from mindie_mm.shm.format.mindie_words import CHARSET, PLAN
from mindie_mm.shm.mindie import (
    SegmentSpec,
    SegmentsView,
    create_shm,
    decode_shape_from_int64,
    decode_shm_name_from_int64,
    encode_shape_to_int64,
    encode_shm_name_to_int64,
    get_data_from_shm,
    is_segment_word,
    release_shared_memory,
)
from mindie_mm.shm.path_file import read_contents, recorded
from tests.namespaces import UNSHARE, require

SHM = Path("/dev/shm")
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "mindie.json").read_text())


def ids(entries):
    return [str(entry.get("why") or entry.get("name") or entry.get("shape")) for entry in entries]


# Words


@pytest.mark.parametrize("vector", VECTORS["names"], ids=ids(VECTORS["names"]))
def test_names_encode_as_in_mindie(vector):
    assert encode_shm_name_to_int64(vector["name"]) == vector["word"]
    assert decode_shm_name_from_int64(vector["word"]) == vector["decoded"]


@pytest.mark.parametrize("vector", VECTORS["shapes"], ids=ids(VECTORS["shapes"]))
def test_shapes_encode_as_in_mindie(vector):
    assert encode_shape_to_int64(vector["shape"]) == vector["word"]
    assert decode_shape_from_int64(vector["word"]) == vector["shape"]


def test_names_encode_to_golden_values():
    for name in ("abCD123", "psm_abCD123"):
        assert encode_shm_name_to_int64(name) == -2110989766714458114
    assert decode_shm_name_from_int64(-2110989766714458114) == "psm_abCD123"
    assert encode_shm_name_to_int64("psm_8c9d4828") == -2381361077748236288
    assert decode_shm_name_from_int64(-2381361077748236288) == "psm_8c9d4828"


@given(st.text(CHARSET, min_size=1, max_size=11))
def test_every_name_round_trips(characters):
    word = encode_shm_name_to_int64(characters)
    assert -(2**63) <= word < 0
    assert decode_shm_name_from_int64(word) == f"psm_{characters}"
    assert is_segment_word(word) == (len(characters) == 8 and set(characters) <= set("0123456789abcdef"))


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(*(st.integers(1, 1 << (bits - 1)) for bits in PLAN[n]))))
def test_every_shape_round_trips(shape):
    word = encode_shape_to_int64(shape)
    assert -(2**63) <= word < 0
    assert decode_shape_from_int64(word) == list(shape)


def test_words_may_be_integers_or_numpy_or_torch_scalars():
    name, shape = encode_shm_name_to_int64("psm_8c9d4828"), encode_shape_to_int64([7, 3])
    for kind in (int, np.int64, torch.tensor):
        assert decode_shm_name_from_int64(kind(name)) == "psm_8c9d4828"
        assert decode_shape_from_int64(kind(shape)) == [7, 3]
        assert is_segment_word(kind(name))
    for given_shape in ((7, 3), np.array([7, 3]), torch.tensor([7, 3]), torch.zeros(7, 3).shape):
        assert encode_shape_to_int64(given_shape) == shape


@pytest.mark.parametrize("vector", VECTORS["refused_names"], ids=ids(VECTORS["refused_names"]))
def test_an_invalid_name_word_is_refused(vector):
    with pytest.raises(CorruptReference, match=str(vector["word"])):
        decode_shm_name_from_int64(vector["word"])
    assert not is_segment_word(vector["word"])


@pytest.mark.parametrize("vector", VECTORS["refused_shapes"], ids=ids(VECTORS["refused_shapes"]))
def test_an_invalid_shape_word_is_refused(vector):
    with pytest.raises(CorruptReference, match=str(vector["word"])):
        decode_shape_from_int64(vector["word"])


def test_each_name_and_each_shape_has_one_word():
    """Every accepted word decodes to a value that encodes to the same word. Damaged and random words are tried."""
    generator = random.Random(3)
    names = [encode_shm_name_to_int64(f"psm_{generator.randrange(1 << 32):08x}") for _ in range(50)]
    shapes = [encode_shape_to_int64((generator.randrange(1, 1 << 27), generator.randrange(1, 2000))) for _ in range(50)]
    values = [word ^ 1 << bit for word in names + shapes for bit in range(64)]
    values += [-generator.randrange(1 << 63) for _ in range(20_000)]
    num_names = 0
    for value in values:
        for decode, encode in (
            (decode_shm_name_from_int64, encode_shm_name_to_int64),
            (decode_shape_from_int64, encode_shape_to_int64),
        ):
            try:
                decoded = decode(value)
            except CorruptReference:
                continue
            assert encode(decoded[4:] if isinstance(decoded, str) else decoded) == value
        num_names += is_segment_word(value)
    assert num_names < len(values) // 50
    # MindIE's decoder ignores bits 3 to 17 and the sign.
    for name in names:
        assert not any(is_segment_word(-(-name ^ 1 << bit)) for bit in (*range(18), 63))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", InputError, "has no character"),
        ("psm_", InputError, "has no character"),
        ("psm_8c9d-828", InputError, "'-', which is not one of"),
        ("psm_8c9dg828", InputError, "'g', which is not one of"),
        ("8cpsm_4828", InputError, "'_', which is not one of"),
        ("psm_psm_4828", InputError, "'_', which is not one of"),
        ("/psm_4828", InputError, "'/', which is not one of"),
        ("psm_\u0661", InputError, "which is not one of"),
        ("psm_8c9d48280ab", LimitExceeded, "has 15 characters; the limit is 14"),
        ("8c9d48280abc", LimitExceeded, "has 12 characters; the limit is 11"),
        (b"psm_8c9d4828", InputError, "is not a string"),
        (None, InputError, "is not a string"),
    ],
)
def test_names_that_mindie_would_misread_are_refused(name, error, message):
    with pytest.raises(error, match=message):
        encode_shm_name_to_int64(name)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((), LimitExceeded, "has 0 axes; it must have 1 to 5"),
        ((1,) * 6, LimitExceeded, "has 6 axes; it must have 1 to 5"),
        ((-1, 5), InputError, "has size -1 on axis 0; it must be at least 1"),
        ((5, 0), InputError, "has size 0 on axis 1; it must be at least 1"),
        (((1 << 56) + 1,), LimitExceeded, f"on axis 0; the limit is {1 << 56}"),
        (((1 << 28) + 1, 1), LimitExceeded, f"on axis 0; the limit is {1 << 28}"),
        ((1, (1 << 27) + 1), LimitExceeded, f"on axis 1; the limit is {1 << 27}"),
        ((1, 1, (1 << 18) + 1), LimitExceeded, f"on axis 2; the limit is {1 << 18}"),
        ((1, 5, 1, 1), LimitExceeded, "has size 5 on axis 1; the limit is 4"),
        ((1, 1, 5, 1, 1), LimitExceeded, "has size 5 on axis 2; the limit is 4"),
        ((4097, 1, 1, 1, 1), LimitExceeded, "the limit is 4096"),
        ((1, 1, 1, 8193, 1), LimitExceeded, "the limit is 8192"),
        ((2.0, 1), InputError, "2.0; it must be an integer"),
        (("2", 1), InputError, "'2'; it must be an integer"),
        (5, InputError, "5 is not a sequence"),
        (None, InputError, "None is not a sequence"),
    ],
)
def test_shapes_that_mindie_would_misread_are_refused(shape, error, message):
    with pytest.raises(error, match=message):
        encode_shape_to_int64(shape)


@pytest.mark.parametrize("value", [1.5, "1", None, -(2**70), 2**70])
def test_a_word_that_is_not_an_int64_is_refused(value):
    for decode in (decode_shm_name_from_int64, decode_shape_from_int64):
        with pytest.raises((InputError, CorruptReference), match=r"must be an integer|is not in"):
            decode(value)


def test_a_mindie_name_word_is_never_a_native_word():
    """Readers recognize the wire format by the first word, so it must be unambiguous."""
    generator = random.Random(5)
    for characters in ("00000000", "ffffffff", *(f"{generator.randrange(1 << 32):08x}" for _ in range(1000))):
        word = encode_shm_name_to_int64(characters)
        assert -(1 << 62) < word < -1
        with pytest.raises(CorruptReference):
            Ref.from_words(word, None)


# Segments


@pytest.fixture
def path_file(tmp_path):
    """Yield a path file. After the test, release the segments that a failed test has left."""
    path_file = tmp_path / "shm_name.txt"
    yield path_file
    with suppress(CorruptReference):
        release(path_file)


def put(array: np.ndarray, path_file: Path):
    """Store an array in a new segment. Return the segment, its name word and its shape word."""
    segment = create_shm(array.nbytes, path_file)
    np.ndarray(array.shape, array.dtype, segment.buf)[...] = array
    return segment, encode_shm_name_to_int64(segment.name), encode_shape_to_int64(array.shape)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float16", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(1,), (5, 7), (2, 3, 4), (1, 2, 3, 4), (2, 1, 2, 3, 5)])
def test_an_array_reads_back_unchanged(path_file, dtype, shape):
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    segment, name, word = put(array, path_file)
    for words in ((name, word), (torch.tensor(name), torch.tensor(word)), (np.int64(name), np.int64(word))):
        found = get_data_from_shm(*words, dtype=dtype)
        assert found.device.type == "cpu"
        assert np.array_equal(found.numpy(), array)
        assert found.numpy().dtype == array.dtype
    assert np.array_equal(get_data_from_shm(name, word, array.dtype, torch.device("cpu")).numpy(), array)
    view = SegmentsView({"x": SegmentSpec.from_words(name, word, dtype)}, {"grid": [1, 2]})
    assert list(view) == ["x", "grid"]
    assert np.array_equal(view["x"], array)
    assert not view["x"].flags.writeable
    assert view["grid"].tolist() == [1, 2]
    assert segment.size == array.nbytes
    assert release(path_file) == 1


def test_the_default_dtype_is_float32(path_file):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    _, name, word = put(array, path_file)
    assert get_data_from_shm(name, word).dtype == torch.float32
    assert np.array_equal(get_data_from_shm(name, word).numpy(), array)
    release(path_file)


def test_copies_and_views_outlive_the_segment(path_file):
    _, name, word = put(np.arange(100, dtype=np.float32), path_file)
    copy = get_data_from_shm(name, word)
    view = SegmentsView({"x": SegmentSpec.from_words(name, word, "float32")}, {})
    release_shared_memory(path_file)
    assert copy.sum() == view["x"].sum() == 4950
    view.verify()


def test_a_segment_is_recorded_private_and_reserved(path_file):
    first, second = create_shm(1, path_file), create_shm(5000, str(path_file))
    assert path_file.read_text() == f"{first.name}\n{second.name}\n"
    for segment in (first, second):
        status = (SHM / segment.name).stat()
        assert status.st_size == segment.size == len(segment.buf)
        assert status.st_mode & 0o7777 == 0o600
        assert status.st_nlink == 1
        assert status.st_blocks * 512 >= segment.size
        assert is_segment_word(encode_shm_name_to_int64(segment.name))
        segment.close()
        segment.close()
    assert release(path_file) == 2
    first.unlink()


def test_closing_a_segment_keeps_the_memory_of_its_arrays(path_file):
    segment = create_shm(8, path_file)
    array = np.ndarray((2,), np.float32, segment.buf)
    segment.close()
    segment.unlink()
    array[:] = 3
    assert array.tolist() == [3, 3]


def test_python_shared_memory_reads_and_writes_segments(path_file, start):
    """Another process opens the segment, because Python's resource tracker unlinks registered segments."""
    segment, name, word = put(np.arange(10, dtype=np.float32), path_file)
    script = """
from multiprocessing import resource_tracker
resource_tracker.register = lambda name, kind: None
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(sys.argv[1])
array = np.ndarray((10,), np.float32, segment.buf)
say(segment.size, array.tolist())
array += 1
del array
segment.close()
theirs = SharedMemory(create=True, size=40)
np.ndarray((10,), np.float32, theirs.buf)[:] = 7
say(theirs.name)
hear()
"""
    process = start(script, segment.name)
    assert process.hear() == f"40 {[float(i) for i in range(10)]}"
    theirs = process.hear()
    with path_file.open("a") as file:
        file.write(f"{theirs}\n")
    assert get_data_from_shm(name, word).tolist() == list(range(1, 11))
    assert get_data_from_shm(encode_shm_name_to_int64(theirs), word).tolist() == [7.0] * 10
    assert release(path_file) == 2


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (0, InputError, "the size of a segment is 0;"),
        (-1, InputError, "the size of a segment is -1;"),
        (1.0, InputError, "the size of a segment is 1.0;"),
        ("1", InputError, "the size of a segment is '1';"),
        (True, InputError, "the size of a segment is True;"),
        (10**9 + 1, LimitExceeded, "the size of a segment is 1000000001 bytes; the limit is 1000000000"),
    ],
)
def test_an_invalid_segment_size_is_refused(path_file, size, error, message):
    with pytest.raises(error, match=message):
        create_shm(size, path_file)
    assert not path_file.exists()


def test_a_segment_that_cannot_be_recorded_is_not_created(tmp_path):
    before = set(SHM.glob("psm_*"))
    for path_file in (tmp_path / "gone" / "shm_name.txt", tmp_path):
        with pytest.raises(SharedMemoryError, match=f"path file {path_file} cannot be written"):
            create_shm(100, path_file)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(SharedMemoryError, match="cannot be written"):
        create_shm(100, link)
    assert set(SHM.glob("psm_*")) == before


def test_a_line_is_removed_when_its_segment_is_not_created(path_file):
    """If another program uses the name before the segment is linked, the line is removed from the path file."""

    def fail(after=b""):
        with recorded(path_file, "psm_00000002"):
            path_file.write_bytes(path_file.read_bytes() + after)
            raise FileExistsError

    path_file.write_text("psm_00000001\n")
    with pytest.raises(FileExistsError):
        fail()
    assert path_file.read_text() == "psm_00000001\n"
    with pytest.raises(FileExistsError):
        fail(b"psm_00000003\n")
    assert path_file.read_text() == "psm_00000001\npsm_00000002\npsm_00000003\n"


def test_a_full_dev_shm_reports_the_free_bytes(tmp_path):
    """In a mount namespace whose /dev/shm has 1 MiB, creation fails without SIGBUS and leaves no file."""
    script = """
import os, sys
from pathlib import Path
from mindie_mm.errors import SharedMemoryError
from mindie_mm.shm.mindie import create_shm, release_shared_memory
path_file = Path(sys.argv[1])
first = create_shm(900_000, path_file)
try:
    create_shm(200_000, path_file)
except SharedMemoryError as error:
    print(error)
print(os.listdir("/dev/shm") == [first.name], path_file.read_text() == first.name + "\\n")
print(release_shared_memory(path_file), os.listdir("/dev/shm"))
"""
    command = f"mount -t tmpfs -o size=1m none /dev/shm && exec {sys.executable} -c '{script}' {tmp_path / 'x.txt'}"
    own_mounts = (*UNSHARE, "--mount")
    require(own_mounts)
    done = subprocess.run([*own_mounts, "sh", "-c", command], capture_output=True, text=True, check=True)
    message, kept, released = done.stdout.splitlines()
    assert "/dev/shm has 147456 of 1048576 bytes free, but the segment needs 200000" in message
    assert "--shm-size" in message
    assert (kept, released) == ("True True", "1 []")


def test_a_missing_segment_is_refused(path_file):
    _, name, word = put(np.zeros(10, np.float32), path_file)
    release(path_file)
    with pytest.raises(SegmentMissing, match=r"there is no segment /dev/shm/psm_"):
        get_data_from_shm(name, word)
    with pytest.raises(SegmentMissing):
        SegmentsView({"x": SegmentSpec.from_words(name, word, "float32")}, {})


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((11,), "float32", SegmentMissing, "has 40 bytes, but its handle words and dtype require 44"),
        ((10,), "float64", SegmentMissing, "has 40 bytes, but its handle words and dtype require 80"),
        ((1 << 20,), "uint8", SegmentMissing, "has 40 bytes"),
        ((9,), "float32", CorruptReference, "has 40 bytes, but its handle words and dtype require 36"),
        ((10,), "float16", CorruptReference, "has 40 bytes, but its handle words and dtype require 20"),
        ((13,), np.uint8, CorruptReference, "has 40 bytes, but its handle words and dtype require 13"),
        ((1 << 56,), "float32", LimitExceeded, "the limit is 1000000000"),
        ((4096, 4096, 4, 8192, 8192), "float32", LimitExceeded, "the limit is 1000000000"),
    ],
)
def test_a_segment_of_the_wrong_size_is_refused(path_file, shape, dtype, error, message):
    _, name, _ = put(np.zeros(10, np.float32), path_file)
    word = encode_shape_to_int64(shape)
    with pytest.raises(error, match=message):
        get_data_from_shm(name, word, dtype)
    with pytest.raises(error, match=message):
        SegmentsView({"x": SegmentSpec.from_words(name, word, np.dtype(dtype).name)}, {})
    release(path_file)


@pytest.mark.parametrize("dtype", ["object", "U3", "complex64", "no dtype", object(), np.datetime64])
def test_an_unsupported_dtype_is_refused(path_file, dtype):
    _, name, word = put(np.zeros(10, np.float32), path_file)
    with pytest.raises(InputError, match="is not one of uint8"):
        get_data_from_shm(name, word, dtype)
    release(path_file)


def test_swapped_and_damaged_words_are_refused(path_file):
    _, name, word = put(np.zeros((50, 1176), np.uint8), path_file)
    with pytest.raises(CorruptReference):
        get_data_from_shm(word, name, np.uint8)
    for bit in range(63):
        for words in ((-(-name ^ 1 << bit), word), (name, -(-word ^ 1 << bit))):
            with pytest.raises((BadReference, LimitExceeded)):
                get_data_from_shm(*words, np.uint8)
    for bad in (0, -1, 1, 151655):
        with pytest.raises(CorruptReference):
            get_data_from_shm(bad, word, np.uint8)
        with pytest.raises(CorruptReference):
            get_data_from_shm(name, bad, np.uint8)
    with pytest.raises(
        CorruptReference,
        match="encodes the name psm_abCD123; the name of a segment must be psm_ and 8 hexadecimal digits",
    ):
        get_data_from_shm(encode_shm_name_to_int64("abCD123"), word, np.uint8)
    release(path_file)


def test_a_segment_truncated_after_attaching_is_detected(path_file):
    segment, name, word = put(np.zeros(3000, np.float32), path_file)
    view = SegmentsView({"x": SegmentSpec.from_words(name, word, "float32")}, {})
    with view:
        assert view["x"][-1] == 0
    os.truncate(SHM / segment.name, 4096)
    with pytest.raises(SegmentMissing, match="has 4096 bytes, but its handle words and dtype require 12000"):
        view.verify()
    with pytest.raises(SegmentMissing):
        view["x"]
    release(path_file)


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "socket"])
def test_a_special_file_with_a_segment_name_is_neither_read_nor_removed(tmp_path, path_file, kind):
    name = next(f"psm_{n:08x}" for n in range(1 << 32) if not (SHM / f"psm_{n:08x}").exists())
    path, target = SHM / name, tmp_path / "target"
    target.write_bytes(bytes(40))
    path_file.write_text(f"{name}\n")
    try:
        if kind == "link":
            path.symlink_to(target)
        elif kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        with pytest.raises(SegmentMissing, match=name):
            get_data_from_shm(encode_shm_name_to_int64(name), encode_shape_to_int64([10]))
        assert release(path_file) == 0
        assert os.path.lexists(path)
        assert target.exists()
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


def test_another_users_segment_is_neither_read_nor_removed(path_file):
    if os.geteuid():
        pytest.skip("only root can create a file of another user")
    segment, name, word = put(np.zeros(10, np.float32), path_file)
    os.chown(SHM / segment.name, 12345, -1)
    with pytest.raises(SegmentMissing, match="not a regular file of user 0"):
        get_data_from_shm(name, word)
    assert release(path_file) == 0
    assert (SHM / segment.name).exists()
    os.chown(SHM / segment.name, 0, -1)
    assert release(path_file) == 1


# Path files


def test_release_frees_both_blocks_and_segments(arena: Arena, path_file):
    def block():
        with arena.allocate({"x": ArraySpec((10,), "uint8")}, path_file=path_file) as block:
            return block.publish()

    first, segment, second, other = block(), create_shm(100, path_file), block(), create_shm(100, path_file)
    contents = read_contents(path_file)
    assert [(ref.block, ref.generation) for ref in contents.refs] == [(r.block, r.generation) for r in (first, second)]
    assert contents.segments == [segment.name, other.name]
    assert contents.damaged == []
    assert release_shared_memory(str(path_file)) == 4
    assert release_shared_memory(path_file) == 0
    assert arena.num_blocks == 0
    assert release_shared_memory(path_file.parent / "missing.txt") == 0


def test_damaged_lines_do_not_keep_segments_from_being_released(path_file):
    segment = create_shm(100, path_file)
    other = create_shm(100, path_file)
    path_file.write_bytes(b"psm_abCD123\n" + path_file.read_bytes() + b"\x00\npsm_12345678")
    with pytest.raises(
        CorruptReference, match=r"3 lines are not references \(line 1, 4, 5\); the other 2 references were released"
    ):
        release(path_file)
    assert not (SHM / segment.name).exists()
    assert not (SHM / other.name).exists()


def test_a_truncated_line_releases_no_segment(path_file):
    segment = create_shm(100, path_file)
    whole = path_file.read_bytes()
    for size in range(1, len(whole)):
        path_file.write_bytes(whole[:size])
        with pytest.raises(CorruptReference, match="1 lines are not references"):
            release(path_file)
        assert (SHM / segment.name).exists()
    path_file.write_bytes(whole)
    assert release(path_file) == 1


def test_release_frees_all_segments_of_a_killed_process(path_file, start):
    """A process is killed at random moments while it creates segments. Its path file lists all of them."""
    before = set(SHM.glob("psm_*"))
    script = """
from mindie_mm.shm.mindie import create_shm
say("ready")
while True:
    segment = create_shm(100_000, Path(sys.argv[1]))
    segment.buf[:] = b"x" * 100_000
"""
    generator = random.Random(7)
    for _ in range(5):
        process = start(script, path_file)
        process.hear()
        size = generator.randrange(13, 13 * 100)
        while not path_file.exists() or path_file.stat().st_size < size:
            pass
        process.kill()
        assert release(path_file) > 0
        assert set(SHM.glob("psm_*")) == before
        path_file.unlink()


def test_a_request_that_ends_while_segments_are_created_leaves_none(path_file, tmp_path, start):
    """The request directory is renamed and released while a tokenizer still creates segments in it."""
    before = set(SHM.glob("psm_*"))
    script = """
from mindie_mm.shm.mindie import create_shm
for request in iter(hear, ""):
    try:
        while True:
            create_shm(1000, Path(request) / "shm_name.txt")
    except SharedMemoryError:
        say("ended")
"""
    process = start(script)
    for number in range(20):
        request = tmp_path / str(number)
        request.mkdir()
        process.say(request)
        while not (request / "shm_name.txt").exists():
            pass
        hidden = request.rename(tmp_path / f".{number}")
        release(hidden / "shm_name.txt")
        assert process.hear() == "ended"
        assert set(SHM.glob("psm_*")) == before


def test_path_files_and_segments_need_neither_numpy_nor_torch():
    modules = "mindie_mm.shm.path_file, mindie_mm.shm.mindie"
    script = f"import sys, {modules}; print({{'numpy', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
