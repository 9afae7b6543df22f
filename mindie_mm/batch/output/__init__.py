"""The output of a batch: shards, their manifest, and the Dataset class that reads them."""
