"""Images: decoding, color conversion, resizing, tiles and patches."""
