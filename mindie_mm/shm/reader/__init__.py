"""The readers' side of an arena. A process maps each arena once, and views and frees blocks through this mapping."""
