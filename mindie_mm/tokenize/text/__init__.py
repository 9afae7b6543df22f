"""Conversion of text to ids and back, with chat templates, control tokens and detokenization."""
