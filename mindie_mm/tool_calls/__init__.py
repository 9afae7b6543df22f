"""Parsers and grammars for the tool calls and the reasoning in a model's text."""
