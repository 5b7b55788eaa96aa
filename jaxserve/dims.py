"""The dimension key: one letter per array axis, used in einsum strings, type strings and name suffixes. And the two integer helpers that shapes need."""

DIMENSIONS: dict[str, str] = {
    "B": "sequences",
    "T": "packed tokens (all sequences of a step on one axis)",
    "S": "context length",
    "D": "model width",
    "N": "query heads",
    "K": "key/value heads",
    "G": "query heads per key/value head, N / K",
    "H": "head dim",
    "F": "MLP width",
    "V": "vocabulary",
    "L": "layers",
    "E": "experts",
    "P": "pages of one layer",
    "Z": "page size, in tokens",
    "M": "page-table width, in pages",
}


def ceil_div(a: int, b: int) -> int:
    """The smallest integer ``n`` with ``n * b >= a``, for ``b > 0``."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is ``>= a``, for ``b > 0``."""
    return ceil_div(a, b) * b
