"""The tool-call formats of this package."""
