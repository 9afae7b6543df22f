"""Schemas of request bodies and answers, and their description in /openapi.json."""
