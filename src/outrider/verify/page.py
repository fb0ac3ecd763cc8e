"""Takes an evaluation's result, gives it as an HTML or markdown page or as JSON; measures nothing.

Everything that qualifies a number stands in the same file as the number.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import check_out_file, read_json, write_atomic, write_json
from outrider.report.page import Section, page, table, verbatim
from outrider.show import evaluation_tables, plain, show_lines

FORMS = (".html", ".md", ".json")
EVALUATION_NAME = "evaluation.json"  # in a run folder: what an export's model card shows


def check_page(path: Path) -> None:
    """Raises UserError when no page could be written at `path`, before any work."""
    check_out_file(path, "--page", endings=FORMS)
    if path.suffix == ".json" and path.is_file():
        try:
            read_page(path)
        except UserError as error:
            raise UserError(f"--page {path}: exists and is no evaluation: name another file") from error


def write_page(path: Path, result: Mapping[str, Any]) -> None:
    """The tables of `result` and all its conditions, as `path` ends; `.json` is the result itself."""
    if path.suffix == ".json":
        write_json(path, result)
        return
    if path.suffix == ".html":
        sections = [Section(title, [table(rows, header=header)]) for title, header, rows in _tables(result)]
        text = page("Evaluation", [*sections, Section("Conditions", [verbatim(_conditions(result))])])
    else:
        text = f"# Evaluation\n\n{markdown(result)}\n"
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_page(path: Path) -> dict[str, Any]:
    """The result that a `.json` page holds. Raises UserError when it is no evaluation."""
    result = read_json(path, what="the evaluation")
    try:
        markdown(result)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no evaluation that could be shown ({type(error).__name__}: {error}): write it again with "
                        "outrider evaluate --page, or remove it") from error
    return dict(result)


def markdown(result: Mapping[str, Any]) -> str:
    """Every table of `result`, then its conditions, each under a heading of the second level."""
    parts = [f"## {title}\n\n{_markdown(header, rows)}" for title, header, rows in _tables(result)]
    return "\n\n".join([*parts, f"## Conditions\n\n```\n{_conditions(result)}\n```"])


def _tables(result: Mapping[str, Any]) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    slots = [_slots(result)] if result["acceptance_by_slot"] else []
    return [*((title or "Result", header, rows) for title, header, rows in evaluation_tables(result)), *slots]


def _conditions(result: Mapping[str, Any]) -> str:
    return "\n".join(show_lines(result["conditions"]))


def _slots(result: Mapping[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    survival = result.get("survival_by_slot", [None] * len(result["acceptance_by_slot"]))
    rows: list[tuple[str, ...]] = [(str(i), plain(a), plain(s))
                                   for i, (a, s) in enumerate(zip(result["acceptance_by_slot"], survival, strict=True), 1)]
    return "Acceptance by slot", ("slot", "given all slots before", "of all forwards"), rows


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    width = len(header or rows[0])
    lines = [header or [""] * width, ["---"] * width, *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")
