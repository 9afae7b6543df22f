"""Limits on hostile media, checked before and during decoding."""
