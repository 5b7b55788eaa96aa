"""The commands of ``jaxserve bench``."""
