"""The simulator: steps that can be worked out by hand, laws that hold for all times, and the verb that prints it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlap import overlap_ms
from test_ledger import BORN_FROM

from outrider import cli
from outrider.errors import UserError
from outrider.planner.measured import read_measured
from outrider.planner.simulate import Arrangement, Simulated, StageTimes, arrangements_of, simulate
from outrider.planner.timeline import TRACE_NAME, TraceFile, read_trace, waits_by_side, within, write_trace
from outrider.records import Span
from outrider.show import show_plan


def run(
    capture: float, learn: float, *, copy: float = 0.0, gradients: float = 0.0, update: float = 0.0, **changes: Any
) -> Simulated:
    given = {"processes": 1, "capture_cards": 0, "micro_batches": 1, "one_at_a_time": False, "gpus_per_machine": 8, **changes}
    return simulate(StageTimes(capture, copy, learn, gradients, update), Arrangement(**given))


@pytest.mark.parametrize(("expected", "found"), [
    (3 * (60 + 40) + 5, run(60, 40, update=5, micro_batches=3)),  # colocated: one after the other
    (3 * 60, run(60, 40, update=5, micro_batches=3, capture_cards=1)),  # a pair that waits for its target
    (3 * 40 + 5, run(30, 40, update=5, copy=2, micro_batches=3, capture_cards=1)),  # one that waits for its drafter
    (60 / 2, run(60, 10, capture_cards=2)),  # a fan-in halves what the target costs
    (40 + 7 + 5, run(60, 40, gradients=7, update=5, capture_cards=3, processes=4)),  # all meet in the sum
    (60 + 40 + 7, run(60, 40, gradients=7, processes=4)),
    (4 * 60 + 40, run(60, 40, processes=4, one_at_a_time=True)),  # all wait for the last one's turn
    (60 + 40, run(60, 40, processes=4, one_at_a_time=True, gpus_per_machine=1)),  # but each machine has its own turn
    (2 * 60 + 40, run(60, 40, processes=4, one_at_a_time=True, gpus_per_machine=2)),
    (2 * 60, run(60, 40, processes=2, capture_cards=1, one_at_a_time=True)),
    (40 + 2 * 60, run(60, 40, processes=2, capture_cards=1, one_at_a_time=True, host_learns=True)),  # learned, then its turn
    (60, run(60, 40, processes=2, capture_cards=1, host_learns=True)),
])
def test_steps_that_can_be_worked_out(expected: float, found: Simulated) -> None:
    assert found.step_ms == pytest.approx(expected, rel=0.02)


def test_how_long_each_side_waits() -> None:
    pair = run(60, 40, capture_cards=1)
    assert pair.waits["capture"] == pytest.approx(0.0, abs=0.01)
    assert pair.waits["learn"] == pytest.approx(1 - 40 / 60, abs=0.01)
    assert run(60, 40).waits == {"learn": pytest.approx(0.0, abs=0.01)}


TIMES = st.floats(0.0, 100.0)


@settings(max_examples=60, deadline=None)
@given(capture=TIMES, copy=TIMES, learn=TIMES, gradients=TIMES, update=st.floats(0.1, 100.0), processes=st.integers(1, 4),
       cards=st.integers(0, 3), micro=st.integers(1, 3), turns=st.booleans(), host=st.booleans())
def test_laws(
    capture: float, copy: float, learn: float, gradients: float, update: float, processes: int, cards: int, micro: int,
    turns: bool, host: bool,
) -> None:
    """A device does one thing at a time, nothing is learned before it has come, and no step beats its slowest device."""
    found = run(capture, learn, copy=copy, gradients=gradients, update=update, processes=processes, capture_cards=cards,
                micro_batches=micro, one_at_a_time=turns, gpus_per_machine=64, host_learns=host)
    by_lane: dict[str, list[Span]] = {}
    for span in found.spans:
        by_lane.setdefault(span.lane, []).append(span)
    for lane in by_lane.values():
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(lane)), lane
    for process in range(processes):
        captured = sorted(s.end for s in found.spans if s.lane.startswith(f"{process} ") and s.label == "capture")
        learned = [s.begin for s in found.spans if s.lane == f"{process} learn" and s.label == "learn"]
        assert all(made <= used + 1e-9 for made, used in zip(captured, learned, strict=False))
        assert len(learned) <= len(captured) <= len(learned) + cards * (2 if host else 1)
    drafter = micro * learn + gradients + update
    target = micro * capture
    assert found.step_ms >= max(drafter, target / cards if cards else drafter + target) - 1e-6
    if turns:
        assert found.step_ms >= processes * target - 1e-6
        captures = [s for s in found.spans if s.label == "capture" and s.end > s.begin]
        assert overlap_ms(captures, "capture", "capture") == pytest.approx(sum(s.end - s.begin for s in captures))


def test_arrangements_use_all_cards() -> None:
    assert arrangements_of(8) == [(8, 0), (4, 1), (2, 3), (1, 7)]
    assert arrangements_of(1) == [(1, 0)]


# The verb


def planned(**options: Any) -> dict[str, Any]:
    return cli.plan(BORN_FROM, gpus="4x rtx-pro-6000", settings=[f"target.path={BORN_FROM.with_suffix('')}"], **options)


def test_measured_times_change_what_is_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.toml"
    times.write_text("capture_ms = 90.0\nlearn_ms = 100.0\nupdate_ms = 20\nsum_ms = 0\ncopy_ms = 1.5\n")
    result = planned(simulate=8, times=times, page=tmp_path / "line.html")
    simulated = result["simulated"]
    best = simulated["arrangements"][0]
    assert (best["processes"], best["capture_cards"], best["step_ms"]) == (8, 0, pytest.approx(210.0))
    pairs = next(one for one in simulated["arrangements"] if one["capture_cards"] == 1)
    assert pairs["step_ms"] == pytest.approx(120.0)
    assert pairs["supervised_tokens_per_s"] == pytest.approx(4 * 512 * 15 / 0.120, rel=1e-3)
    assert pairs["changes"] == {"train.accumulation": 4}
    assert simulated["times"] == str(times)
    assert [one["gpus"] for one in simulated["by_gpus"]] == [1, 2, 4, 8]
    show_plan(result)
    shown = capsys.readouterr().out
    assert "4 pairs: target card, drafter card" in shown
    assert "0 learn |" in shown
    page = (tmp_path / "line.html").read_text()
    assert "<svg" in page
    assert "8 x target and drafter on one card" in page


def test_without_measured_times_the_plan_says_so() -> None:
    simulated = planned(simulate=4)["simulated"]
    assert simulated["times"] == "the plan's own predictions, none measured"
    for one in simulated["arrangements"]:
        assert one["step_ms"] > 100
        assert one["fits"] == (one["headroom_bytes"] >= 0)
    assert planned(simulate=64)["simulated"]["arrangements"][0]["gpus"] == 64


@pytest.mark.parametrize(("capture", "learn", "rest"), [(0.001, 0, 0), (0, 0.001, 0), (0, 0.001, 86_400_000),
                                                        (86_400_000, 86_400_000, 86_400_000)])
def test_the_shortest_and_the_longest_times_make_a_time_line(tmp_path: Path, capture: float, learn: float, rest: int) -> None:
    times = tmp_path / "times.toml"
    times.write_text(f"capture_ms = {capture}\nlearn_ms = {learn}\nupdate_ms = {rest}\nsum_ms = {rest}\ncopy_ms = {rest}\n")
    result = planned(simulate=64, times=times)
    assert all(0 < one["step_ms"] < 1e11 for one in result["simulated"]["arrangements"])
    show_plan(result)


@pytest.mark.parametrize(("placement", "arrangements", "fewer"), [
    ("colocated", [(8, 0)], [1, 2, 4, 8]), ("pairs", [(4, 1)], [2, 4, 8]), ("fan-in", [(2, 3), (1, 7)], [4, 8]),
])
def test_a_placement_is_simulated_alone(placement: str, arrangements: list[tuple[int, int]], fewer: list[int]) -> None:
    simulated = planned(simulate=8, placement=placement)["simulated"]
    found = {(one["processes"], one["capture_cards"]) for one in simulated["arrangements"]}
    assert found == set(arrangements)
    assert [one["gpus"] for one in simulated["by_gpus"]] == fewer


def test_one_gpu_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(planned(simulate=1, page=tmp_path / "line.html"))
    assert "Simulated: 1 GPU, machines" in capsys.readouterr().out
    assert "1 GPUs" not in (tmp_path / "line.html").read_text()


def test_a_trace_is_kept_and_read(tmp_path: Path) -> None:
    spans = [Span("0 learn", "capture", 0.0, 4.0)]
    for i in range(4):
        at = 100.0 * i
        spans += [Span("0 learn", "capture", at, at + 60 + i), Span("0 learn", "learn", at + 70, at + 90),
                  Span("0 learn", "sum", at + 90, at + 92), Span("1 learn", "sum", at + 91, at + 92),
                  Span("0 learn", "update", at + 92, at + 99)]
    trace = TraceFile("cpu", 4, 2, 1, tuple(spans))
    write_trace(tmp_path / TRACE_NAME, trace)
    assert read_trace(tmp_path / TRACE_NAME) == trace
    assert trace.step_ms() == pytest.approx(100.0)
    assert trace.stages() == {"capture": 62.5, "learn": 20.0, "sum": 1.0, "update": 7.0}
    measured = read_measured(tmp_path)
    assert measured.stages == trace.stages()
    assert measured.source.endswith("traced on cpu")
    assert read_measured((tmp_path / TRACE_NAME).rename(tmp_path / "kept.json")).stages == measured.stages
    assert waits_by_side([Span("0 learn", "learn", 0, 10), Span("1 learn", "learn", 0, 30)], 0, 40) == {"learn": 0.5}
    assert within([Span("a", "b", 0, 10), Span("a", "b", 10, 20)], 5, 10) == [Span("a", "b", 0, 5)]


TRACED = {"device": "cpu", "steps": 2, "processes": 1, "micro_batches": 1,
          "spans": [["0 learn", "update", 0, 1], ["0 learn", "update", 1, 2]]}


@pytest.mark.parametrize(("name", "text", "sentence"), [
    ("t.toml", "capture_ms = 1\nlearn_ms = 2", "'update_ms' is missing"),
    ("t.toml", "capture_ms = 1\nlearn_ms = 2\nupdate_ms = -1", "update_ms = -1: must be a time in ms"),
    ("t.toml", "capture_ms = 1\nlearn_ms = 2\nupdate_ms = 1.7e308",
     r"t\.toml: update_ms = 1\.7e\+308: must be a time in ms, from 0 to 86,400,000 \(a day\)"),
    ("t.toml", "capture_ms = 0\nlearn_ms = 0\nupdate_ms = 0",
     r"t\.toml: capture_ms = 0, learn_ms = 0: must be at least 0\.001 ms together"),
    ("t.toml", "capture = 1", "unknown key 'capture': did you mean 'capture_ms'"),
    ("t.toml", "x =", "not valid TOML"),
    ("t.json", "[1]", "must hold keys and numbers"),
    ("t.json", '{"capture_ms": true, "learn_ms": 1, "update_ms": 1}', "capture_ms = True: must be a time"),
    ("t.json", "{", "not valid JSON"),
    ("trace.json", "{}", "is not a trace that a run wrote"),
    ("trace.json", json.dumps(TRACED | {"spans": []}), r"trace\.json: holds 0 whole steps, at least 2"),
    ("trace.json", json.dumps(TRACED | {"processes": 0}), r"trace\.json: processes = 0: must be a whole number from 1"),
    ("trace.json", json.dumps(TRACED | {"micro_batches": -3}), "micro_batches = -3: must be"),
    ("trace.json", json.dumps(TRACED | {"steps": True}), "steps = True: must be"),
    ("trace.json", json.dumps(TRACED | {"steps": 2.5}), "steps = 2.5: must be"),
    ("trace.json", json.dumps(TRACED | {"spans": [["0 learn", "update", 2, 1]] * 3}), "from 2.0 to 1.0 ms: must not end before"),
    (None, "", "the trace is missing: make one with"),
])
def test_what_is_no_file_of_times(tmp_path: Path, name: str | None, text: str, sentence: str) -> None:
    if name is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_measured(tmp_path if name in (None, "trace.json") else tmp_path / str(name))


@pytest.mark.parametrize(("options", "sentence"), [
    ({"simulate": 0}, "--simulate 0: must be a number of GPUs from 1 to 64"), ({"simulate": 65}, "from 1 to 64"),
    ({"simulate": 7, "placement": "pairs"}, "--placement pairs: has no arrangement that takes all of --simulate 7: name another"),
    ({"page": Path("x.html")}, "--page x.html: belongs to --simulate"), ({"times": Path("x")}, "--times x: belongs to"),
    ({"simulate": 2, "page": Path("x.png")}, r"--page x\.png: must end in \.html or \.svg"),
])
def test_options_that_do_not_go(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        planned(**options)


def test_a_step_of_many_micro_batches_is_simulated_in_fewer_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """4,096 micro-batches took 31 s without a word; fewer steps of them come to the same time a step."""
    times, few, many = StageTimes(3.0, 0.5, 2.0, 1.0, 4.0), 24, 480
    for cards, one_at_a_time in ((0, False), (1, False), (3, True)):
        def step_ms(micro: int, cards: int = cards, one_at_a_time: bool = one_at_a_time) -> float:
            return simulate(times, Arrangement(2, cards, micro, one_at_a_time, 8)).step_ms

        each = (step_ms(2 * few) - step_ms(few)) / few
        assert step_ms(many) == pytest.approx(step_ms(few) + (many - few) * each, rel=0.01)
    assert len(simulate(times, Arrangement(1, 0, many, False, 8)).spans) <= 4 * (2 * many + 2)
    planned(simulate=2)
    assert "simulate: 3/3 arrangements" in capsys.readouterr().err
