"""Caches of the engine: KV blocks, shared prefixes, and features of media."""
