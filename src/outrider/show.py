"""Takes a verb's result, gives what a person reads of it; knows nothing of how it was made."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PLAIN_WIDTH = 130  # columns where stdout is no terminal and has no width of its own


def wide_console() -> Console:
    """Stdout, with its own width on a terminal and a fixed one in a pipe or file."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def show_result(result: Mapping[str, Any]) -> None:
    """A result's values, one a line; nested dictionaries are indented."""
    console = wide_console()
    for line in _lines(result, indent=0):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(result: Mapping[str, Any], *, indent: int) -> list[str]:
    lines = []
    for key, value in result.items():
        name = " " * indent + key.replace("_", " ")
        if isinstance(value, Mapping) and value:
            lines += [f"{name}:", *_lines(value, indent=indent + 2)]
        else:
            lines.append(f"{name}: {plain(value)}")
    return lines


def plain(value: Any) -> str:
    """A value as a person reads it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}"
        case list() | tuple():
            return ", ".join(plain(item) for item in value) or "none"
        case dict():
            return "none"
        case _:
            return str(value)


def show_evaluation(result: Mapping[str, Any]) -> None:
    """The accepted length, by slot and by kind, the walls of both sides, and whether the texts are the same."""
    console = wide_console()
    console.print(slot_table({"accepted, given all slots before": result["acceptance_by_slot"]}))
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in evaluation_rows(result):
        table.add_row(escape(name), escape(text))
    console.print(table)


def evaluation_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The headline of an evaluation, each number with what qualifies it."""
    conditions = result["conditions"]
    rows = [("accepted length tau", f"{result['tau']:.3f} tokens per target forward (1 is no help, "
                                    f"{conditions['block_size']} the ceiling)")]
    rows += [(f"  tau, {kind}", f"{tau:.3f}") for kind, tau in result.get("tau_by_kind", {}).items()]
    return [
        *rows,
        ("with the drafter", f"{result['tokens_per_s']:.1f} tokens/s"),
        ("target alone", f"{result['baseline_tokens_per_s']:.1f} tokens/s ({conditions['baseline']})"),
        ("speed-up", f"{result['speedup']:.2f} x"),
        ("same text as the target alone", identity(result)),
        ("conditions", f"{conditions['prompts']} prompts, up to {conditions['max_new_tokens']} tokens, temperature "
                       f"{conditions['temperature']}, target {conditions['target_dtype']}, {conditions['device']}, "
                       f"{conditions['threads']} threads"),
    ]


def identity(result: Mapping[str, Any]) -> str:
    """The losslessness check in words."""
    if result["identical"] is None:
        return "not compared: sampled texts differ by chance"
    if result["identical"]:
        return f"yes, token for token, in all {result['conditions']['prompts']} prompts"
    first = result["first_difference"]
    what = "at a tie of rounding" if first["kind"] == "tie" else "NOT A TIE"
    return f"no: first difference at prompt {first['prompt']}, token {first['position']}, {what} (logit gap {first['gap']:.2g})"


def slot_table(acceptance: Mapping[str, Sequence[float]]) -> Table:
    """Acceptance by slot, one row a measurement."""
    table = Table(title="Acceptance by slot", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    slots = max(len(values) for values in acceptance.values())
    for slot in range(1, slots + 1):
        table.add_column(str(slot), justify="right")
    for name, values in acceptance.items():
        table.add_row(name, *(f"{value:.2f}" for value in values))
    return table
