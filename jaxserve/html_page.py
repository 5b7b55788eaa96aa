"""Pages that are complete in themselves, in one style: nothing is fetched, nothing runs. What stands on them is their callers' business."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light; --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --good: #16a34a }
body { margin: 0; background: #f8fafc; color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 64px }
h1 { font-size: 25px; margin: 0 } h2 { font-size: 18px; margin: 34px 0 10px }
p.sub, ul.note { color: var(--soft); margin: 4px 0 } li { margin: 4px 0 }
section, .card { background: white; border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; margin: 12px 0; overflow-x: auto }
section.note { background: #fffbeb; border-color: #fde68a }
.cards, .panels { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)) } .cards > *, .panels > * { margin: 0 }
.panels { grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)) } .panels svg { width: 100% }
.card b { display: block; font-size: 20px; margin: 2px 0 } .card i { font-style: normal; color: var(--good); font-weight: 600 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } table.wide { width: 100%; font-size: 13px; white-space: pre-line }
th, td { padding: 5px 14px 5px 0; text-align: right; vertical-align: top; white-space: nowrap; border-bottom: 1px solid var(--line) }
.wide th, .wide td { padding: 8px 10px; white-space: inherit } th { color: var(--soft); font-weight: 600 }
th:first-child, td:first-child, .left { text-align: left } tr.no td { color: var(--soft) }
dl { display: flex; flex-wrap: wrap; gap: 10px 40px; margin: 4px 0 }
dt { color: var(--soft); font-size: 13px } dd { margin: 0; font-size: 20px; font-weight: 600 }
svg, img { max-width: 100%; height: auto } summary { cursor: pointer; color: var(--soft) }
"""


def text(value: object) -> str:
    """Anything as text of a page or of an attribute."""
    return html.escape(str(value), quote=True)


def lines(values: Iterable[object]) -> str:
    """Texts one below the other."""
    return "<br>".join(map(text, values))


def table(headers: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts; the first column is to the left. Without headers it has no such row."""
    head = f"<tr>{''.join(f'<th>{text(header)}</th>' for header in headers)}</tr>" if headers else ""
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: As text.
        parts: Its body, as HTML.
    """
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{text(title)}</title>"
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )
