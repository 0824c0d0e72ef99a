"""`python -m jfla.cli` is `jfla`."""

from jfla.cli import main

main()
