"""`python -m jaxserve`, the same as `jaxserve`."""

from jaxserve.cli import main

main(prog_name="jaxserve")
