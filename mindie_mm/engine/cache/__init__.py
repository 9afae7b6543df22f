"""Caches of the engine: KV blocks, shared prefixes and media features."""
