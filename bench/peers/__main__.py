"""Entry point of `python -m bench.peers`."""

from bench.peers import main

main()
