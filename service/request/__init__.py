"""A request on its way through the service: admission, media, prompts, and the choices of its answer."""
