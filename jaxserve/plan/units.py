"""Bytes as text, the same in tables, budgets and advice."""

from __future__ import annotations


def format_bytes(num_bytes: float, *, digits: int = 1) -> str:
    """``1.5 GiB``: in the largest binary unit that it reaches, with ``digits`` after the point."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"
