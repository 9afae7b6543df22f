"""The engine process and its start: ranks of tensor parallelism, memory profile, trials of kernels."""
