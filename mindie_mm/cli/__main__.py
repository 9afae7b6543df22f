"""python -m mindie_mm.cli."""

from mindie_mm.cli import main

main()
