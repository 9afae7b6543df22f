"""The interface of model families, and code that the families share: paged attention, splicing and weights."""
