"""The endpoints, one module for each."""
