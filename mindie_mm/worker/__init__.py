"""The worker, which combines the tokenizer, the engine and retries. `LLM` and offline generation use the worker."""
