"""Audio: decoding, resampling and mel spectrograms."""
