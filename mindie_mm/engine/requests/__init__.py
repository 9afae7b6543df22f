"""What is asked of the engine: messages, sampling parameters, and the sequences that they become."""
