"""The readers of blocks: mapping an arena once, and viewing and freeing the blocks in it."""
