"""Structured outputs. A description of the output is first checked, and then enforced token by token."""
