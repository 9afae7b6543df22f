"""Preprocess with every family's processor: `python -m tests.lockdown.families FOLDER < MEDIA > RESULTS`, pickled.

FOLDER contains a checkpoint for each family. MEDIA maps each kind to a file. Each file is preprocessed in this process
and in a sandboxed child.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mindie_mm.inputs import Media, MediaOptions
from mindie_mm.media.guard.caps import under
from mindie_mm.media.warm import warm_up
from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Processor
from mindie_mm.settings.config import MediaCaps
from tests.lockdown.children import in_locked_child
from tools.arguments import parser


def digests(processors: Mapping[str, Processor], media: Mapping[str, bytes]) -> dict[tuple[str, str], str]:
    """Return a digest of the arrays, for each processor and each kind of media that the processor accepts."""
    return {
        (name, kind): digest_of(processor, Media(kind, Path("unread"), MediaOptions()), media[kind])
        for name, processor in processors.items()
        for kind in processor.placeholders
    }


def digest_of(processor: Processor, item: Media, data: bytes) -> str:
    with under(MediaCaps()):
        plan, write = processor.plan(item, data, Counter({item.kind: 1}))
        arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
        write(arrays)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()


def processors_of(folder: Path) -> dict[str, Processor]:
    checkpoints = {path.name: Checkpoint.open(path) for path in sorted(folder.iterdir())}
    return {name: family_of(checkpoint).processor(checkpoint) for name, checkpoint in checkpoints.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path, metavar="FOLDER")
    folder = options.parse_args().folder
    media = pickle.load(sys.stdin.buffer)
    warm_up()
    processors = processors_of(folder)
    found, noticed = in_locked_child(lambda: digests(processors, media))
    sys.stdout.buffer.write(pickle.dumps((found, noticed, digests(processors, media))))


if __name__ == "__main__":
    main()
