"""Files in /dev/shm: how they are made, locked, mapped and removed."""
