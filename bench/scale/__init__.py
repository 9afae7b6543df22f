"""Benchmarks and a model of services with several engines, and of clusters."""
