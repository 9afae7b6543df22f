"""Tools for operators: a survey of /dev/shm and the reclamation of memory that dead processes left behind."""
