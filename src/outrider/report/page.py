"""Takes text, tables and drawings, gives one HTML page that needs no other file; knows nothing of what they mean.

Everything that is not a drawing is escaped: a run's names and texts come from outside.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top } th { font-weight: 600 }
td.number { text-align: right } pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: .85rem }
svg { max-width: 100%; height: auto } p.note { color: #555 }
"""


@dataclass(frozen=True)
class Section:
    """A heading and its parts, each a piece of HTML made by the functions below."""

    title: str
    parts: Sequence[str]


def note(text: str) -> str:
    """A paragraph that explains."""
    return f'<p class="note">{escape(text)}</p>'


def verbatim(text: str) -> str:
    """Text as it stands, in a box."""
    return f"<pre>{escape(text)}</pre>"


def table(rows: Iterable[Sequence[str | int | float]], *, header: Sequence[str] = ()) -> str:
    """A table; numbers stand on the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _cell(value: str | int | float) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f'<td class="number">{value:,.4g}</td>'


def page(title: str, sections: Iterable[Section]) -> str:
    """The whole document."""
    body = "".join(f"<h2>{escape(section.title)}</h2>{''.join(section.parts)}" for section in sections if section.parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n'
