"""The command line. Commands import jax, transformers and the servers inside themselves, so that help and errors come at once."""

from jaxserve.cli.app import main

__all__ = ["main"]
