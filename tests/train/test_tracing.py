"""A traced run says what ran when, in all of its processes, learns what it would have learned, and its page draws it."""

from collections.abc import Callable
from typing import Any

import torch
from spawning import in_processes
from test_loop import final_tensors

from outrider.config import RunConfig
from outrider.planner.measured import read_measured
from outrider.planner.timeline import TRACE_NAME, read_trace
from outrider.report.run import report
from outrider.train.forecast import card_of
from outrider.train.loop import take_part, train
from outrider.train.processes import Processes

MakeRun = Callable[..., RunConfig]


def test_a_pair_is_traced_drawn_and_learns_the_same(make_run: MakeRun) -> None:
    plain = make_run("plain")
    run = make_run("traced", **{"train.trace_steps": 6, "placement.capture_cards": 1})
    train(plain, check=None)
    assert not (plain.train.folder / TRACE_NAME).exists()
    train(run, check=None)
    assert all(torch.equal(a, b) for a, b in zip(final_tensors(plain).values(), final_tensors(run).values(), strict=True))
    trace = read_trace(run.train.folder / TRACE_NAME)
    assert (trace.device, trace.steps, trace.processes, trace.micro_batches) == ("cpu", 6, 1, 2)
    count = {(lane, label): sum((s.lane, s.label) == (lane, label) for s in trace.spans)
             for lane, label in {(s.lane, s.label) for s in trace.spans}}
    assert count[("0 learn", "learn")] == 12
    assert count[("0 learn", "sum")] == 6
    assert 12 <= count[("0 capture 0", "capture")] <= 14, "those of the steps, and what was ahead when they ended"
    assert count[("0 learn", "update")] == 5, "an update ends when the next step has its features"
    assert set(trace.waits()) == {"learn", "capture"}
    assert all(0 <= share < 1 for share in trace.waits().values())
    assert read_measured(run.train.folder).stages.keys() == {"capture", "learn", "update"}
    report(run.train.folder)
    page = (run.train.folder / "report.html").read_text()
    assert "Time line" in page
    assert "capture devices wait" in page
    report(plain.train.folder)
    assert "Time line" not in (plain.train.folder / "report.html").read_text()


def part(processes: Processes, run: RunConfig) -> dict[str, Any]:
    return take_part(run, processes, check=None, initial=None, card_of=card_of)


def test_all_processes_are_in_one_trace(make_run: MakeRun) -> None:
    run = make_run(**{"train.trace_steps": 4, "train.steps": 4, "train.rows_per_batch": 1, "train.precision": "float32"})
    in_processes(2, part, run)
    trace = read_trace(run.train.folder / TRACE_NAME)
    assert {span.lane for span in trace.spans} == {"0 learn", "1 learn"}
    ends = [[s.end for s in trace.spans if s.lane == f"{rank} learn" and s.label == "sum"] for rank in range(2)]
    assert len(ends[0]) == len(ends[1]) == 4
    # both leave a sum together: on one clock, but for what a busy machine does to one of them
    assert sorted(abs(a - b) for a, b in zip(*ends, strict=True))[1] < 50
    assert trace.stages()["sum"] > 0
