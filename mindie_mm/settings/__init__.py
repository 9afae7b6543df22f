"""Settings of the worker and the service, the sources of their values, and the number of CPUs that may be used."""
