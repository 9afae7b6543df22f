"""Entry point of `python -m bench.serve`."""

from bench.serve import main

main()
