"""`python -m nybble`."""

from .cli import main

main()
