"""A checkpoint directory: files, configuration, published weight names, and the tokens that end an answer."""
