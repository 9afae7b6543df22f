"""Files on disk that contain blocks. A file is written once, and then read like an arena."""
