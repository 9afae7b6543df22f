"""Files of blocks on disk. Such a file is written once and then read like an arena."""
