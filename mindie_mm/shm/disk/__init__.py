"""Files on disk that hold blocks. A file is written once, and then read like an arena."""
