"""The service on Ray Serve: CPU-only ingress replicas in front of replicas that are one whole worker each."""
