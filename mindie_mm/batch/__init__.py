"""Offline tokenisation: rows of prompts in, shards of ids and arrays out, which a worker runs or a trainer reads.

What is read       source (files of rows, cut into chunks), row (one record to one prompt)
What is made       shard (a table beside a file of blocks), manifest (the settings, and in the end the counts)
Who does it        stage (one chunk to its shards), process (a worker that does so), place (where it is),
                   run (workers, resume, deaths)
Who sees it        progress, dataset, sheet (the pictures of a row)
"""

from mindie_mm.batch.dataset import Dataset, Sample

__all__ = ["Dataset", "Sample"]
