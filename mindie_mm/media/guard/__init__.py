"""Limits that protect against hostile media. They are checked before and during decoding."""
