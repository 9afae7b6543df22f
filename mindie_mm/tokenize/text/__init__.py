"""Conversion of text to ids and back: chat templates, control tokens, detokenisation."""
