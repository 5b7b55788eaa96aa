"""jaxserve: an LLM inference engine and server in JAX. Importing the package itself imports nothing else, jax included."""

__version__ = "0.1.0"
