"""Settings: the worker's and the service's configuration, where each value comes from, and what the machine allows."""
