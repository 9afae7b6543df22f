"""The input of a batch: finding files, reading rows from them, and the state of each file."""
