"""The tokenizer stage: the tokenizer process with its client, and the same in the caller's process."""
