"""A worker: tokenizer, engine and retries together. `LLM` and offline generation run it in a script."""
