"""A multimodal serving worker."""
