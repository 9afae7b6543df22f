"""The engine: scheduler, caches, towers, runner and sampler."""
