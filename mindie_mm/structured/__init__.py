"""Structured outputs: JSON schemas and grammars, checked first and then enforced token by token."""
