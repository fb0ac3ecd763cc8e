"""Progress: plain lines off a terminal, a bar with a note on one, both with the time left."""

import errno
import io
import sys

import pytest

from outrider import progress
from outrider.progress import ProgressBar, clock, say


def test_plain_lines_have_counts_time_left_and_the_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressBar("work", total=100, unit="steps") as bar:
        bar.skip(40)  # an earlier run's: they took no time of this one
        for _ in range(30):
            now += 1.0
            bar.advance(1, note="loss 2.0")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 6
    assert lines[1] == "work: 50/100 steps, 0:10 elapsed, 0:50 left, loss 2.0"


def test_the_last_unit_is_always_said(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("work", total=2, unit="steps") as bar:
        bar.advance(1)
        bar.advance(1)
    assert capsys.readouterr().err == "work: 2/2 steps, 0:00 elapsed, 0:00 left\n"


def test_a_terminal_gets_a_bar_with_the_note_and_other_lines_above(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar("work", total=2, unit="steps") as bar:
        bar.advance(1, note="loss 2.0")
        say("measured")
        bar.advance(1)
    text = screen.getvalue()
    assert "2/2" in text
    assert "loss 2.0" in text
    assert "measured" in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_work_goes_on_where_nobody_listens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")  # a terminal that was closed

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setenv("TERM", "xterm")
    say("measured")
    monkeypatch.setattr(Gone, "isatty", lambda self: False)
    with ProgressBar("work", total=1, unit="steps") as bar:
        bar.advance(1, note="loss 2.0")
