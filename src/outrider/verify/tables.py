"""Takes an evaluation's result, gives its tables as Markdown and as one HTML page; measures nothing.

Everything that qualifies a number stands in the same file as the number.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider import show
from outrider.files import write_atomic, write_json
from outrider.report.page import Section, page, table

EVALUATION_NAME = "evaluation.json"
Table = tuple[str, Sequence[str], list[list[str]]]  # a title, a header, rows


def write_report(folder: Path, result: Mapping[str, Any]) -> None:
    """`evaluation.json`, `evaluation.md` and `evaluation.html` in `folder`."""
    write_json(folder / EVALUATION_NAME, result)
    sections = [Section(title, [table(rows, header=header)]) for title, header, rows in tables(result)]
    _write(folder / EVALUATION_NAME.replace(".json", ".md"), markdown(result) + "\n")
    _write(folder / EVALUATION_NAME.replace(".json", ".html"), page("Evaluation", sections))


def _write(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def markdown(result: Mapping[str, Any]) -> str:
    """The tables in Markdown."""
    return "\n\n".join(f"**{title}**\n\n{_markdown_table(header, rows)}" for title, header, rows in tables(result))


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(header), ["---"] * len(header), *escaped])


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Every table of a result, the headline first and the conditions last; empty ones are left out."""
    conditions = result["conditions"]
    found: list[Table] = [
        ("Result", ("", ""), [list(row) for row in show.evaluation_rows(result)]),
        ("Acceptance by slot", ("slot", "accepted, given all slots before"),
         [[str(i), f"{share:.3f}"] for i, share in enumerate(result["acceptance_by_slot"], start=1)]),
        ("Conditions", ("", ""), [[key.replace("_", " "), show.plain(value)] for key, value in conditions.items()]),
    ]
    return [one for one in found if one[2]]
