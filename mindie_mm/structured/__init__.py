"""Structured outputs: descriptions that are checked first and then enforced token by token."""
