"""Processing of requests: admission, media, prompts, and the choices of the answer."""
