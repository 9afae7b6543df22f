"""Documents, whose pages are rendered to images."""
