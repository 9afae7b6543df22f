"""Running other processes: messages between them, starting and restarting, interruption, standard streams."""
