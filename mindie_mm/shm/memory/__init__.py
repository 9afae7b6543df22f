"""Files in /dev/shm: creation, locking, mapping and removal."""
