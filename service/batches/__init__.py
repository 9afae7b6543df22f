"""Batches: files of requests that the service answers beside its other requests, and below them."""
