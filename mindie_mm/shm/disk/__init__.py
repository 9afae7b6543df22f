"""Blocks in a file on disk, which is written once and then read like an arena."""
