"""Fetching of media: parsing of URLs, and HTTP requests to public addresses only."""
