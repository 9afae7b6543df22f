"""The output of a batch: shards, their manifest, and the data set that reads them."""
