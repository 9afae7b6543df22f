"""A checkpoint directory: its files, its configuration and the tokens that end an answer."""
