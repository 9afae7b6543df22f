"""Management of other processes: messages, starts and restarts, interruption, standard streams."""
