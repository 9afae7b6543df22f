"""The output of a run: shards, their manifest, and the class Dataset, which reads shards."""
