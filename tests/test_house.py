"""The house's own rules: who imports whom, what a module says first, how long a file may be."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "outrider"
GROUND = {"command", "config", "errors", "files", "progress", "records", "show"}
ABOVE_ALL = {"cli", "demo"}
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 420


def room_of(module: Path) -> str:
    """The first part of the path below the package: a room's folder, or a module on the ground."""
    return module.relative_to(SOURCE).parts[0].removesuffix(".py")


def rooms_imported(source: str) -> set[str]:
    """Rooms (or ground modules) of outrider that a module's text imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("outrider.")}
    return found - {"__version__"}


def forbidden_imports(room: str, source: str) -> set[str]:
    """What a module of this room imports against the rule: its own room, rooms that sort before it and the ground are free."""
    if room in ABOVE_ALL or room == "__main__":
        return set()
    imported = rooms_imported(source) - GROUND - {room}
    return imported if room in GROUND else {other for other in imported if other > room or other in ABOVE_ALL}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_before_it(module: Path) -> None:
    assert not forbidden_imports(room_of(module), module.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("room", "line", "allowed"), [
    ("layout", "from outrider.model.drafter import Drafter", False),
    ("layout", "import outrider.train.step", False),
    ("layout", "def f():\n    from outrider import verify", False),
    ("verify", "from outrider.demo import prompts", False),
    ("verify", "from outrider.cli import main", False),
    ("config", "from outrider.data.rows import load_rows", False),
    ("train", "from outrider.model.drafter import Drafter", True),
    ("layout", "from outrider.records import TokenRows", True),
    ("demo", "from outrider.weights.export import export", True),
])
def test_the_import_rule_itself(room: str, line: str, allowed: bool) -> None:
    assert (not forbidden_imports(room, line)) == allowed


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(SOURCE)))
def test_a_module_says_first_what_it_is(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert text.startswith('"""'), "the first line is a docstring"
    assert ast.get_docstring(ast.parse(text))
    assert text.count("\n") <= MOST_LINES


def test_every_fault_seen_in_the_wild_has_a_test_that_stands() -> None:
    tests, table = Path(__file__).parent, (Path(__file__).parent / "pitfalls.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*$", table, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 35))
    for line in table.splitlines():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", line)
        assert named or not re.match(r"\| \d", line), line
        for file, test in named:
            assert f"def {test}(" in (tests / file).read_text(encoding="utf-8"), f"{file}::{test}"
