"""The HTTP service: the OpenAI-compatible and MindIE endpoints over a worker."""
