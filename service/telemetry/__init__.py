"""Metrics, traces, and the periodic removal of what dead processes left."""
