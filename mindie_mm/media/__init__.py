"""Decoding of media files to pixels and samples, with limits on hostile files."""
