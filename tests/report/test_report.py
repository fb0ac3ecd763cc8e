"""A run's page: whole, self-contained, every text escaped, and the numbers in it those of the metrics."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.errors import UserError
from outrider.report.drawings import MOST_POINTS, binned, lines
from outrider.report.metrics import read_metrics, series
from outrider.report.page import Section, note, page, table, verbatim
from outrider.report.run import report
from outrider.report.timeline import traced


def training_line(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 7.0 - step / 100, "slot_accuracy": [0.5, 0.25, 0.125], "tau_proxy": 1.5, "gradient_norm": 2.0,
            "learning_rate": 6e-4, "seconds": {"capture": 0.5, "forward": 0.25}, "supervised_slots_per_s": 640.0,
            "anchor_coverage": 0.125, **changes}


def accepted_line(step: int, tau: float) -> dict[str, Any]:
    return {"step": step, "tau": tau, "acceptance_by_slot": [0.4, 0.6, 0.8], "tokens": 100, "forwards": 80}


def run_folder(folder: Path, metrics: list[Any], resolved: str = "[train]\n") -> Path:
    folder.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) for line in metrics]
    (folder / "metrics.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    (folder / "resolved.toml").write_text(resolved, encoding="utf-8")
    return folder


class Outline(HTMLParser):
    """Checks that every tag is closed in order, and collects text, tags and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value or "" for name, value in attrs if name.split(":")[-1] in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_takes_no_other_files_place(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", [training_line(1)])
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"--out .*metrics.jsonl: must end in \.html"):
        report(run, run / "metrics.jsonl")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_the_page_holds_the_runs_numbers_and_needs_no_other_file(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", [training_line(1), training_line(2), accepted_line(1, 1.75), accepted_line(2, 1.25)])
    result = report(run)
    text = (run / "report.html").read_text(encoding="utf-8")
    outline = Outline(text)
    size = len(text.encode())
    assert result == {"report": str(run / "report.html"), "steps": 2, "loss": 6.98, "tau": 1.25, "bytes": size}
    assert "1.250 tokens per target forward (step 2)" in outline.text
    assert "1.750 (step 1)" in outline.text
    assert not outline.seen & {"script", "link", "img", "iframe"}
    assert all(address.startswith("#") for address in outline.addresses)
    assert text.count("<svg") == 8
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_names_and_settings_are_escaped(tmp_path: Path) -> None:
    hostile = '<script>alert("1")</script>'
    run = run_folder(tmp_path / "a<b>&c", [training_line(1, seconds={hostile: 1.0})], resolved=f'[train]\nfolder = "{hostile}"\n')
    report(run)
    text = (run / "report.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert "script" not in outline.seen
    assert "Run a<b>&c" in outline.text
    assert outline.text.count(hostile) >= 2
    every_part = page(hostile, [Section(hostile, [table([(hostile,)], header=[hostile]), verbatim(hostile), note(hostile)])])
    assert "script" not in Outline(every_part).seen


def test_a_run_without_measurements_says_so(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", [training_line(1)])
    assert report(run)["tau"] is None
    assert "no real accepted length was measured" in (run / "report.html").read_text(encoding="utf-8")


def test_odd_lines_are_counted_and_numbers_that_are_none_left_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", [training_line(1), "{cut", "[]", {"step": 2}, training_line(3, loss=float("nan"))])
    metrics = read_metrics(run)
    assert metrics.unreadable == 3
    assert series(metrics.steps, lambda line: line.loss) == ([1.0], [6.99])
    report(run)
    assert "3 lines of metrics.jsonl could not be read" in (run / "report.html").read_text(encoding="utf-8")


ODD_VALUES: list[Any] = [None, True, "7", "NaN", -1, 0.5, 1e400, 10**400, [], [1], [None], [[0.5]], ["x"], {}, {"a": 1},
                         {"a": "b"}, {"a": None}, {"a": -1.0}, {"a": {"b": 1.0}}]


@pytest.mark.parametrize("line", [training_line(2), accepted_line(2, 1.5), {"step": 2, "event": "skipped", "rows": [1]}],
                         ids=["step", "measured", "event"])
def test_no_shape_of_a_line_stops_the_page(tmp_path: Path, line: dict[str, Any]) -> None:
    """Each key in turn absent or of an odd value: a line that could not be drawn is counted, the others are drawn together."""
    odd: list[Any] = [{key: value for key, value in line.items() if key != absent} for absent in line]
    odd += [line | {key: value} for key in line for value in ODD_VALUES]
    odd += ["[" * 5000, "1" * 5000, '"text"', "null", "", "\x00"]
    run = run_folder(tmp_path / "mine", [training_line(1), accepted_line(1, 1.5), *odd])
    metrics = read_metrics(run)
    kept = len(metrics.steps) + len(metrics.measured) + len(metrics.events)
    assert len(line) + 6 <= metrics.unreadable < len(odd)
    assert kept + metrics.unreadable == 2 + len(odd)
    report(run)
    assert f"{metrics.unreadable} lines of metrics.jsonl" in (run / "report.html").read_text(encoding="utf-8")


def test_a_last_line_of_numbers_that_are_none_is_drawn(tmp_path: Path) -> None:
    nothing = {"loss": float("nan"), "tau_proxy": float("inf"), "gradient_norm": float("-inf"), "seconds": {}}
    run = run_folder(tmp_path / "mine", [training_line(1, **nothing)])
    assert report(run)["loss"] is None


def test_a_line_that_is_not_text_or_has_fewer_slots_costs_itself_alone(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", [training_line(1, slot_accuracy=[0.5]), training_line(2)])
    with (run / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"step": 3, \xff\xfe}\n')
    assert report(run)["steps"] == 2
    assert read_metrics(run).unreadable == 1


def test_a_damaged_trace_costs_the_page_its_section_alone(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", [training_line(1)])
    frame = {"device": "cpu", "steps": 2, "processes": 1, "micro_batches": 1}
    update = ["0 learn", "update"]
    for spans in ("{", [], [[*update, 0.0, 1.0]], [[*update, 0.0, 1.0], [*update, 0.0, 1.0]], [[*update, 2.0, 1.0]] * 3,
                  [[*update, 0.0, float("nan")]] * 3):
        (run / "trace.json").write_text(json.dumps(frame | {"spans": spans}), encoding="utf-8")
        assert re.search("Left out: .*trace", traced(run).parts[0])
    report(run)
    assert "Left out: " in (run / "report.html").read_text(encoding="utf-8")


def test_what_is_no_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be read \(No such file or directory\): name a run folder"):
        report(tmp_path)
    run = run_folder(tmp_path / "mine", [accepted_line(0, 1.0)])
    with pytest.raises(UserError, match="holds no finished step yet"):
        report(run)
    assert not list(tmp_path.rglob("*.html"))


def test_long_series_are_averaged_without_losing_their_spread() -> None:
    n = 10 * MOST_POINTS + 3
    (at, means), (low, high) = binned(range(n), [i % 10 for i in range(n)])
    assert len(at) <= MOST_POINTS
    assert means[0] == sum(i % 10 for i in range(11)) / 11
    assert (min(low), max(high)) == (0, 9)
    assert binned([1.0, 2.0], [3.0, 4.0]) == (([1.0, 2.0], [3.0, 4.0]), ([3.0, 4.0], [3.0, 4.0]))


def test_the_same_numbers_give_the_same_bytes() -> None:
    series = {"a": ([1.0, 2.0], [3.0, 5.0]), "b": ([1.0], [2.0])}
    assert lines(series, x="step", y="y") == lines(series, x="step", y="y")


def test_the_memory_as_predicted_and_measured(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [training_line(1), training_line(2)])
    report(run)
    assert "Memory" not in Outline((run / "report.html").read_text(encoding="utf-8")).text
    facts = {"card": "a <card>", "allowed_bytes": 94 * 2**30, "predicted_bytes": 78 * 2**30, "measured_bytes": 80 * 2**30,
             "peak_phase": "update", "by_phase": {"load": 70 * 2**30, "update": 78 * 2**30},
             "groups_at_peak": {"optimizer": 60 * 2**30, "gradients": 18 * 2**30}}
    (run / "memory.json").write_text(json.dumps(facts), encoding="utf-8")
    report(run)
    text = Outline((run / "report.html").read_text(encoding="utf-8")).text
    for told in ("78.00 GiB (-2.5%), in 'update'", "80.00 GiB, in a step of the worst rows", "a <card>, 94.0 GiB allowed", "load",
                 "measured peak", "optimizer"):
        assert told in text
    for damaged in ("{", "[]", json.dumps(facts | {"by_phase": 3}), json.dumps(facts | {"measured_bytes": "x"})):
        (run / "memory.json").write_text(damaged, encoding="utf-8")
        report(run)
        assert "memory.json could not be read" in (run / "report.html").read_text(encoding="utf-8")
