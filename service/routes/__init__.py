"""The HTTP endpoints, one module per group of paths."""
