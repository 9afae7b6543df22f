"""Management of processes: starting and restarting them, messages between them, interrupts and standard streams."""
