"""A stand-in for both halves of MindIE-LLM, written from its published format. It imports nothing of this project.

    python tests/mindie_stand_in.py            reads commands from standard input, one JSON object per line

`write` does what MindIE's tokenizer does: it puts arrays into segments and their words into ids. `read` does what a
worker does. `release` frees the segments that a path file lists. As in MindIE, the process that has created segments
stays alive.
"""

import argparse
import json
import sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import numpy as np

CHARSET = "0123456789abcdefpsmnwABCDEF"
BITS = {1: (57,), 2: (29, 28), 3: (19, 19, 19), 4: (18, 3, 18, 18), 5: (13, 13, 3, 14, 14)}


def name_word(name):
    indices = [CHARSET.index(character) for character in name.removeprefix("psm_")]
    value = len(indices) << 58 | sum(indices) % 16 & 7
    for place, index in enumerate(indices):
        value |= index << 53 - 5 * place
    return -value


def name_of(word):
    value = -word
    indices = [value >> 53 - 5 * place & 31 for place in range(value >> 58 & 31)]
    assert sum(indices) % 16 & 7 == value & 7
    return "psm_" + "".join(CHARSET[index] for index in indices)


def shape_word(shape):
    value, place = len(shape) << 60, 60
    for size, bits in zip(shape, BITS[len(shape)], strict=True):
        assert 0 < size <= 1 << bits - 1
        place -= bits
        value |= int(size) << place
    return -(value | value.bit_count() % 3)


def shape_of(word):
    value, shape, place = -word, [], 60
    assert (value >> 3).bit_count() % 3 == value & 7
    for bits in BITS[value >> 60]:
        place -= bits
        shape.append(value >> place & (1 << bits) - 1)
    return shape


def untracked(segment):
    """Unregister a segment from Python's resource tracker, which would remove the segment when this process ends."""
    resource_tracker.unregister(segment._name, "shared_memory")
    return segment


def put(array, path_file):
    """Return the two words of an array in a new segment."""
    segment = untracked(shared_memory.SharedMemory(create=True, size=array.nbytes))
    with path_file.open("a") as file:
        file.write(f"{segment.name}\n")
    np.ndarray(array.shape, array.dtype, segment.buf)[...] = array
    return name_word(segment.name), shape_word(array.shape)


def get(name, shape, dtype):
    segment = untracked(shared_memory.SharedMemory(name=name_of(name)))
    return np.ndarray(shape_of(shape), dtype, segment.buf).copy()


def release(path_file):
    for name in path_file.read_text().split():
        try:
            segment = shared_memory.SharedMemory(name=name)
        except FileNotFoundError:
            continue
        segment.close()
        segment.unlink()


# The code below knows the layouts. `arrays` are the arrays of a prompt, in the order of their words, or None.


def read_after_start(ids, tokens, dtype):
    for start in np.flatnonzero(ids == tokens["start"]):
        yield get(ids[start + 1], ids[start + 2], dtype)


def write_after_start(ids, arrays, tokens, path_file):
    for start in np.flatnonzero(ids == tokens["start"]):
        ids[start + 1 : start + 3] = put(next(arrays), path_file)
    return ids


def read_qwen2_vl(ids, tokens):
    for start in np.flatnonzero(ids == tokens["start"]):
        name, shape, grid, *seconds = ids[start + 1 : start + 6].tolist()
        yield get(name, shape, np.uint8)
        yield np.array(shape_of(grid))
        if seconds[0] < 0:
            yield get(*seconds, np.float32)


def write_qwen2_vl(ids, arrays, tokens, path_file):
    for start in np.flatnonzero(ids == tokens["start"]):
        is_video = ids[start + 1] == tokens["video"]
        ids[start + 1 : start + 4] = *put(next(arrays), path_file), shape_word(next(arrays))
        if is_video:
            ids[start + 4 : start + 6] = put(next(arrays), path_file)
    return ids


def read_qwen3_vl(ids, tokens):
    first = np.flatnonzero(ids == tokens["start"])[0] + 1
    assert ids[first] in (tokens["image"], tokens["video"])
    words = ids[first + 1 : first + 9].tolist()
    for place, dtype in enumerate((np.float32, np.int32) * 2):
        name, shape = words[2 * place : 2 * place + 2]
        yield get(name, shape, dtype) if name else None


def write_qwen3_vl(ids, arrays, tokens, path_file):
    first = np.flatnonzero(ids == tokens["start"])[0] + 1
    end = np.flatnonzero(ids == tokens["end"])[0]
    assert end - first - 1 >= 9
    words = [word for array in arrays for word in ((0, 0) if array is None else put(array, path_file))]
    ids[first + 1 : first + 9] = words
    return ids


def read_llava_next(ids, tokens):
    places = np.flatnonzero(ids == tokens["image"])
    assert len(places) % 2 == 0
    for first, last in zip(places[::2], places[1::2], strict=True):
        pixels = get(ids[first + 1], ids[first + 2], np.float16)
        size = shape_of(ids[first + 3])
        assert (ids[first + 4 : last] == tokens["pad"]).all()
        yield pixels
        yield np.array([*size, last + 1 - first])


def write_llava_next(ids, arrays, tokens, path_file):
    places = np.flatnonzero(ids == tokens["image"])
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
        if len(run):
            pixels, size = next(arrays), next(arrays)
            ids[run[1:-1]] = tokens["pad"]
            ids[run[1] : run[1] + 3] = *put(pixels, path_file), shape_word(size[:3])
    return ids


AUDIO_DTYPES = (np.float32, np.int64, np.int64, np.int64)


def read_qwen2_audio(ids, tokens):
    (words,) = np.nonzero(ids < -1)
    assert words.tolist() == [*range(8)]
    assert (ids[8:] == tokens["pad"]).all()
    for place, dtype in enumerate(AUDIO_DTYPES):
        yield get(ids[2 * place], ids[2 * place + 1], dtype)


def write_qwen2_audio(ids, arrays, tokens, path_file):
    ids[:] = tokens["pad"]
    ids[:8] = [word for array in arrays for word in put(array, path_file)]
    return ids


READERS = {
    "qwen_vl": lambda ids, tokens: read_after_start(ids, tokens, np.float32),
    "internvl": lambda ids, tokens: read_after_start(ids, tokens, np.uint8),
    "qwen2_vl": read_qwen2_vl,
    "qwen3_vl": read_qwen3_vl,
    "llava_next": read_llava_next,
    "qwen2_audio": read_qwen2_audio,
}
WRITERS = {
    "qwen_vl": write_after_start,
    "internvl": write_after_start,
    "qwen2_vl": write_qwen2_vl,
    "qwen3_vl": write_qwen3_vl,
    "llava_next": write_llava_next,
    "qwen2_audio": write_qwen2_audio,
}


def load(path):
    """Return the arrays in a file. Arrays without elements are absent."""
    with np.load(path) as file:
        return [file[name] if file[name].size else None for name in file.files]


def save(path, arrays):
    np.savez(path, *(np.empty(0) if array is None else array for array in arrays))


def main():
    for line in sys.stdin:
        command = json.loads(line)
        layout, tokens, path_file = command.get("layout"), command.get("tokens"), Path(command["path_file"])
        if command["do"] == "release":
            release(path_file)
        elif command["do"] == "read":
            (ids,) = load(command["given"])
            save(command["found"], READERS[layout](ids, tokens))
        else:
            ids, *arrays = load(command["given"])
            save(command["found"], [WRITERS[layout](ids, iter(arrays), tokens, path_file)])
        print("done", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
