"""Offline tokenisation: rows of prompts in, shards of ids and arrays out, which a worker runs or a trainer reads.

What is read       source (files of rows, cut into chunks), row (one record to one prompt)
What is made       shard (a table beside a file of blocks), manifest (the settings, and in the end the counts)
Who does it        run (settings to a manifest), tally (what is done of it), workers and on_ray (processes here, actors
                   there, and their deaths), process (a worker), cursor (where it is), stage (one chunk to its shards)
Who sees it        progress, dataset, sheet (the pictures of a row)
"""

from mindie_mm.batch.dataset import Dataset, Sample

__all__ = ["Dataset", "Sample"]
