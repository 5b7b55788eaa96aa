"""``python -m jaxserve``."""

from jaxserve.cli import main

if __name__ == "__main__":
    main()
