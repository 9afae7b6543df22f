"""The formats of tool calls, one module each."""
