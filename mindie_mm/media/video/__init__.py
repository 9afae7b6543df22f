"""Videos: timeline, choice of frames, seeking and decoding."""
