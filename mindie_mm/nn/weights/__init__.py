"""A checkpoint's weights: reading, dequantization, tensor parallelism, and loading into modules."""
