"""Structured outputs. Descriptions of outputs are checked first, and then enforced token by token."""
