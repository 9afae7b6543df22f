"""Training and evaluation of the embedded checkpoint."""
