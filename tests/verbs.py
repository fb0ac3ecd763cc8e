"""The command line in this process: a verb's exit code and output, its JSON, or the one sentence with which it refuses."""

import json
import sys
from typing import Any

import pytest

from outrider import cli


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, stdout, stderr."""
    before, sys.argv = sys.argv, ["outrider", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def result(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The JSON object on the last line of stdout of a command that succeeds."""
    code, out, err = call(capsys, *words, "--json")
    assert code == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one sentence of a command that refuses: exit code 2, no traceback, nothing on stdout."""
    code, out, err = call(capsys, *words)
    assert code == 2, (code, err)
    assert "Traceback" not in err
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    return errors[0]
