"""A request's directory: its path file, which records its blocks, and its spooled media."""
