"""The operator's tools: a survey of /dev/shm, and the removal of what dead processes left."""
