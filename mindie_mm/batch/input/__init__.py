"""The input of a run: files, their rows, and the state of each file."""
