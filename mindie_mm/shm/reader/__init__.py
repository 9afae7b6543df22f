"""Readers' side of an arena. Each arena is mapped once, and its blocks are viewed and freed through that mapping."""
