"""The checks of `mindie-mm doctor`: of this machine, and of a checkpoint's settings before its download."""
