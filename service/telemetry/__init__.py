"""Metrics and traces of the service."""
