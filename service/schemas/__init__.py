"""Bodies of requests and answers, and their description in /openapi.json."""
