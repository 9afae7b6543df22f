"""Images: decoding, colour conversion, resizing, tiles and patches."""
