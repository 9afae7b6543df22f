"""The engine process, its tensor-parallel ranks, and the memory profile at start-up."""
