"""A checkpoint's weights: reading, dequantisation, tensor parallelism, and loading into modules."""
