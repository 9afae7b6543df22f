"""Tools for operators: survey /dev/shm, and reclaim memory that dead processes left behind."""
