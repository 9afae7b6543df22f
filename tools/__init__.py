"""Programs that make what the repository ships; no part of the installed package."""
