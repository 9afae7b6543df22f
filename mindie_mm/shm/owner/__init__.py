"""The owner's side of an arena: allocation of blocks, free space and quotas of requests."""
