"""A checkpoint's weights: reading, dequantising, sharding, and loading into modules."""
