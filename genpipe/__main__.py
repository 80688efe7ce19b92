"""``python -m genpipe``."""

from genpipe.cli import main

main()
