"""The contract of model families, and code that families share: paged attention, splicing and weights."""
