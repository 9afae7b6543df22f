"""Structured outputs: JSON schemas that are checked first and then enforced token by token."""
