"""The HTTP service: OpenAI's and MindIE's endpoints for a worker."""
