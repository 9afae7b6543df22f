"""The engine loop: scheduler, caches, runner and sampler."""
