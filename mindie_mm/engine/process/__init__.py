"""The engine process, its tensor-parallel ranks, and the measurement of memory at its start."""
