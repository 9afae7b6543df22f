"""Parts that model families share: the model contract, paged attention, splicing, weights."""
