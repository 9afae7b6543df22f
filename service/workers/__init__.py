"""Several services of one port: the process that starts them, and what they share."""
