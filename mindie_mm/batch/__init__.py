"""Tokenizes rows of prompts offline. The results are shards of token ids and arrays, for a worker or for training.

`run` executes a run: it divides the input into chunks, and worker processes (or Ray actors) write the shards of each
chunk. `input` reads files of rows, and `output` writes shards and reads them. A later call may continue a run if the
settings, the input, the checkpoint and the versions of packages have not changed.
"""

from mindie_mm.errors import InputError

try:
    from mindie_mm.batch.output.dataset import Dataset
    from mindie_mm.batch.output.sample import Sample
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    raise InputError("batches need pyarrow, which is not installed: pip install 'mindie_mm[batch]'") from error

__all__ = ["Dataset", "Sample"]
