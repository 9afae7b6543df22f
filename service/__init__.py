"""The HTTP service: OpenAI's and MindIE's interfaces over a worker."""
