"""Fetching media: URLs, and HTTP restricted to public addresses."""
