"""The worker, which combines tokenizer, engine and retries. `LLM` and offline generation use it in scripts."""
