"""Takes functions that give a dictionary, makes them the commands of one command line, and runs it; knows none of them."""

import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from outrider import show
from outrider.errors import RunFailure, UserError
from outrider.progress import say

# What click raises for wrong words; newer releases of typer carry a click of their own inside.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(name="outrider", add_completion=False, rich_markup_mode=None,
                  help="Train DFlash drafters for your own language model, and measure how much faster it answers.")


def verb(function: Callable[..., dict[str, Any]], display: Callable[[dict[str, Any]], None] = show.show_result) -> Any:
    """Make `function` a command with `--json` (its result as the last line of stdout), and give it back unchanged."""
    signature = inspect.signature(function)
    as_json = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, last on stdout.")],
    )

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        print_json = arguments.pop("as_json")
        try:
            result = function(**arguments)
        except KeyboardInterrupt:
            say("interrupted: what was finished is kept; the same command goes on from there")
            sys.exit(130)
        if print_json:
            print(json.dumps(result, default=str), flush=True)
        else:
            display(result)

    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), as_json])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*signature.parameters.values(), as_json]}
    app.command(function.__name__, help=_help(function))(command)
    return function


def _help(function: Callable[..., Any]) -> str:
    """The docstring, its example kept on one line: it is there to be copied."""
    return (inspect.getdoc(function) or "").replace("Example: ", "\b\nExample: ")


def main() -> None:
    """Run the command line: exit code 0 on success, 2 on a user's mistake (one sentence), 1 on any other failure."""
    # Threads of torch that wait should sleep, not spin: beside other work spinning made answers 7 times slower; alone on the
    # machine sleeping costs 18 % (bench/LOG.md), and who is alone can set ACTIVE.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries below are for terminals, as ours are
    try:
        sys.exit(app(args=sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except UserError as error:
        say(f"error: {error}")
    except UsageError as error:
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        verb = f" {sys.argv[1]}" if sys.argv[1] in {command.name for command in app.registered_commands} else ""
        say(f"error: {message}: see outrider{verb} --help")
    except RunFailure as error:
        say(f"failed: {error}")
        sys.exit(1)
    except OSError as error:  # a closed pipe, a full disk under stdout
        say(f"failed: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered for stdout cannot go there
        sys.exit(1)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(2)
