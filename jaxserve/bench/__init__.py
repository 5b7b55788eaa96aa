"""Load against a server, and what came of it. Imports neither jax nor numpy: a benchmark starts at once and needs no chip."""
