"""Requests to the engine: messages, sampling parameters and state."""
