"""The owner of an arena: which blocks there are, where each lies, and which request each counts against."""
