"""The tokenizer stage: its interface, and the tokenizer process with its client."""
