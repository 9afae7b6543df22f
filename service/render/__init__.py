"""vLLM's /render API: prompts as token ids, with places and hashes of their media."""
