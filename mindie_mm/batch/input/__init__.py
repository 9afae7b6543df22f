"""The input of a batch: files, the rows in them, and the state of each file."""
