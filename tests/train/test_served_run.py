"""A run whose features come from a server learns what it would have learned from a target of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hidden_states_double import HiddenStatesServer, hidden_states_server
from overlap import overlap_ms
from spawning import in_processes
from test_loop import final_tensors

from outrider.config import RunConfig
from outrider.errors import UserError
from outrider.features.target import Target
from outrider.planner.timeline import TRACE_NAME, read_trace
from outrider.train.forecast import card_of
from outrider.train.loop import take_part, train
from outrider.train.processes import Processes

MakeRun = Callable[..., RunConfig]
PLAIN: dict[str, Any] = {"train.precision": "float32", "train.rows_per_batch": 1, "train.accumulation": 2}


@pytest.fixture
def double(toy_target: Callable[..., Target], tmp_path: Path) -> HiddenStatesServer:
    (tmp_path / "shared").mkdir()
    return HiddenStatesServer(toy_target("llama"), tmp_path / "shared", (2, 3, 5))


def served(make_run: MakeRun, name: str, double: HiddenStatesServer, url: str, **changes: Any) -> RunConfig:
    return make_run(name, **{**PLAIN, "features.server": url, "features.server_folder": str(double.folder), **changes})


def assert_alike(run: RunConfig, other: RunConfig) -> None:
    a, b = final_tensors(run), final_tensors(other)
    for name in (name for name in b if name.startswith(("layers", "fc", "exp"))):
        assert (a[name] - b[name]).norm() <= 1e-3 * b[name].norm(), name  # rounding of the features, through ten steps of Adam


def part(processes: Processes, run: RunConfig) -> Any:
    return take_part(run, processes, check=None, initial=None, card_of=card_of)["steps"]


def test_the_run_learns_the_same_alone_and_in_two_processes(make_run: MakeRun, double: HiddenStatesServer) -> None:
    plain = make_run("plain", **PLAIN)
    train(plain, check=None)
    with hidden_states_server(double) as url:
        double.write_s = 0.02
        double.fault = lambda number, tokens: None if number % 7 == 3 else "serve"  # every seventh answer is lost
        run = served(make_run, "served", double, url, **{"train.trace_steps": 8})
        train(run, check=None)
        assert_alike(run, plain)
        trace = read_trace(run.train.folder / TRACE_NAME)
        assert {span.lane for span in trace.spans} == {"0 learn", "0 capture 0"}
        assert overlap_ms(trace.spans, "capture", "learn") > 0, "the next rows are asked for while the present ones are learned"
        two = served(make_run, "two", double, url, **{"features.server_check": "first"})
        assert in_processes(2, part, two) == [10, 10]
        assert_alike(two, plain)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"placement.capture_cards": 1}, r"placement\.capture_cards = 1: features\.server captures elsewhere: set it to 0"),
    ({"data.heldout": "held.jsonl"}, r"data\.heldout = 'held\.jsonl': the real accepted length needs a target"),
])
def test_settings_that_do_not_go_with_a_server(
    make_run: MakeRun, double: HiddenStatesServer, changes: dict[str, Any], sentence: str
) -> None:
    run = served(make_run, "run", double, "http://127.0.0.1:9", **changes)
    with pytest.raises(UserError, match=sentence):
        train(run, check=None)
    assert not run.train.folder.exists()


def test_no_server_no_run(make_run: MakeRun, double: HiddenStatesServer) -> None:
    run = served(make_run, "run", double, "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/v1/models: the server cannot be reached"):
        train(run, check=None)
    assert not run.train.folder.exists()
