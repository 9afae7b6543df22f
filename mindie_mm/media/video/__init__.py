"""Videos: frame times, sampling of frames, seeking and decoding."""
