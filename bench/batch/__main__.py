"""Entry point of `python -m bench.batch`."""

from bench.batch import main

main()
