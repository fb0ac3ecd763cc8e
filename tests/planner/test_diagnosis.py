"""The doctor: cause, ledger line, plan against measurement and ways out, of records that training's own writer makes and of logs
with a run file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_ledger import BORN_FROM, born_from  # noqa: F401 - the fixture
from test_record import made

from outrider import cli
from outrider.errors import UserError
from outrider.planner import lines as at
from outrider.planner.doctor.comparison import REST, compare
from outrider.planner.doctor.diagnosis import Diagnosis, diagnose_log, diagnose_record
from outrider.planner.doctor.log import read_log
from outrider.planner.doctor.matching import find_lines, is_size, tensors_of
from outrider.planner.doctor.record import Blocks, CardProcess, Moment, Record
from outrider.planner.gpus import CATALOGUE
from outrider.planner.job import Job
from outrider.planner.ledger import colocated, learner
from outrider.show import show_diagnosis

LOGS = Path(__file__).parent / "logs"
GIB = 2**30
CARD = CATALOGUE["rtx-pro-6000"].usable_bytes
HERE = [f"target.path={BORN_FROM.with_suffix('')}"]


def message(requested: int) -> str:
    """As torch 2.11 words it."""
    amount = f"{requested / GIB:.2f} GiB" if requested >= GIB else f"{requested / 2**20:.2f} MiB"
    return (f"CUDA out of memory. Tried to allocate {amount}. GPU 0 has a total capacity of {CARD / GIB:.2f} GiB of which "
            "0.10 GiB is free.")


def record_of(
    path: Path, job: Job, *, requested: int, allocated: int, phase: str = "backward", unused: int = GIB, fused: bool = True,
    growth: tuple[tuple[int, int], ...] = (), **changes: Any,
) -> Record:
    """A record of a learner on an RTX PRO 6000, written by the writer and then given what a GPU would have read."""
    counts = {"allocated_bytes": allocated, "peak_allocated_bytes": allocated, "reserved_bytes": allocated + unused,
              "peak_reserved_bytes": allocated + unused, "split_and_free_bytes": unused, "retries": 1, "out_of_memories": 1}
    usual = {
        "message": message(requested), "device": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "total_bytes": CARD,
        "allowed_bytes": CARD, "free_bytes": GIB // 10, "statistics": counts, "moment": Moment(phase, 7, fused, growth),
        "frames": ("train/step.py:118 run_step", "torch/_tensor.py:630 backward"),
    }
    return made(path, job, **(usual | changes))


def planned_held(job: Job) -> dict[str, int]:
    return {"drafter: masters": 4 * job.parameters, "optimizer: both moments": 8 * job.parameters}


@pytest.fixture
def diagnosed(born_from: Job, tmp_path: Path) -> Callable[..., Diagnosis]:  # noqa: F811
    def make(**options: Any) -> Diagnosis:
        usual = {"requested": 700 * 2**20, "allocated": 30 * GIB}
        return diagnose_record(record_of(tmp_path / "oom.json", born_from, **(usual | options)))

    return make


# Records: each cause from what the record states


@pytest.mark.parametrize(("options", "cause"), [
    ({}, "too large"),
    ({"unused": 20 * GIB}, "fragmentation"),
    ({"processes": (CardProcess(4242, "serve", 60 * GIB),)}, "another process"),
    ({"growth": tuple((n, 20 * GIB + n * 2**29) for n in range(0, 20, 2))}, "leak"),
    ({"growth": tuple((n, 20 * GIB + (n % 4) * 2**27) for n in range(0, 20, 2))}, "too large"),
    ({"error": "triton.runtime.errors.OutOfResources", "message": "out of resource: shared memory, Required: 114688, Hardware "
      "limit: 101376. Reducing block sizes or `num_stages` may help."}, "shared memory"),
    ({"frames": ("flex.py:905 sdpa_dense_backward",), "fused": False}, "unfused attention"),
    ({"frames": ("adamw.py:160 _init_group",), "phase": "optimizer"}, "optimizer birth"),
    ({"frames": ("fused_drafter.py:190 give_gradients",)}, "gradient birth"),
    ({"message": "CUDA out of memory."}, "not stated"),
])
def test_the_first_cause_of_a_record(options: dict[str, Any], cause: str, diagnosed: Callable[..., Diagnosis]) -> None:
    found = diagnosed(**options)
    assert found.causes[0].name == cause
    said = {finding.name: finding.ok for finding in found.findings}
    assert set(said) == {"leak", "fragmentation", "unfused attention", "another process", "too large"}
    assert all((answer is False) == (name in {c.name for c in found.causes}) for name, answer in said.items())


def test_where_no_cause_is_stated_none_is_said_to_come_first_and_no_log_is_spoken_of(born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    record = record_of(tmp_path / "oom.json", born_from, requested=GIB, allocated=GIB, statistics={}, message=message(GIB))
    found = diagnose_record(record)
    assert (found.causes[0].name, found.requested) == ("not stated", GIB)
    assert {finding.name: (finding.ok, finding.message) for finding in found.findings}["too large"] == (None, "not stated")
    assert "log" not in found.summary
    named = diagnose_record(replace(record, frames=("adamw.py:160 _init_group",)))
    assert {finding.name: finding.message for finding in named.findings}["too large"] == "another cause comes first"


def test_a_shared_memory_error_is_no_device_memory_and_gets_no_device_remedies(diagnosed: Callable[..., Diagnosis]) -> None:
    found = diagnosed(error="triton.runtime.errors.OutOfResources",
                      message="out of resource: shared memory, Required: 114688, Hardware limit: 101376.")
    assert "the card's own memory did not run out" in found.summary
    assert found.remedies == ()
    assert "--set train.attention=dense" in found.note


@pytest.mark.parametrize(("name", "phase"), [
    ("layer: gate and up", "forward"), ("gradients of the masters", "backward"), ("optimizer: both moments", "optimizer"),
    ("loss: logits of one chunk", "forward"), ("features", "capture"), ("gradients: gate, up", "backward"),
])
def test_a_request_is_traced_to_its_line_through_the_messages_rounding(
    name: str, phase: str, born_from: Job, tmp_path: Path,  # noqa: F811
) -> None:
    ledger = colocated(born_from)
    line = next(item for item in ledger.lines if item.name == name)
    size = max(size for _, size in tensors_of(born_from, line))
    stated = -(-size // 2**21) * 2**21  # the allocator asks for whole numbers of 2 MiB, and the message has two decimals
    changes = {"frames": ("adamw.py:160 _init_group",)} if phase == "optimizer" else {}
    found = diagnose_record(record_of(tmp_path / "oom.json", born_from, requested=stated, allocated=60 * GIB, phase=phase,
                                      lines=ledger.lines, by_phase=ledger.by_phase, roles=ledger.roles, **changes))
    assert name in [match.line.name for match in found.matches]
    assert name == found.matches[0].line.name or len(found.matches) > 1
    assert f"'{found.matches[0].line.name}'" in found.summary
    assert found.matches[0].tensor in found.summary


def test_no_line_is_claimed_for_another_size_or_another_phase_or_a_small_segment(born_from: Job) -> None:  # noqa: F811
    ledger = learner(born_from)
    features = next(item for item in ledger.lines if item.name == "features").tensor_bytes
    where = {"phases": (at.CAPTURE,), "names": ()}
    assert [m.line.name for m in find_lines(born_from, ledger, features, **where)] == ["features"]
    assert find_lines(born_from, ledger, int(1.02 * features), **where) == []
    assert find_lines(born_from, ledger, features, phases=(at.LOAD,), names=()) == []
    for segment in (2 * 2**20, 20 * 2**20):
        assert find_lines(born_from, ledger, segment, phases=(), names=()) == []
    assert is_size(11 * 2**20 + 512, 12 * 2**20)
    assert not is_size(11 * 2**20 + 512, 14 * 2**20)


def test_planned_against_measured_adds_up_and_the_largest_surprise_comes_first(born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    held = planned_held(born_from) | {"optimizer: both moments": 10 * born_from.parameters}
    scores = 16 * GIB
    ledger = learner(born_from)
    found = record_of(tmp_path / "oom.json", born_from, requested=scores, allocated=ledger.peak_bytes + scores, held=held,
                      phase="forward")
    rows = compare(found)
    assert sum(row.measured for row in rows) == ledger.peak_bytes + scores
    assert rows[0].name == REST
    (moments,) = (row.surprise for row in rows if row.name == "optimizer: both moments")
    assert moments == pytest.approx(2 * born_from.parameters, abs=2 * 512)
    assert sorted((abs(row.surprise) for row in rows), reverse=True) == [abs(row.surprise) for row in rows]


def test_blocks_of_a_lines_size_are_counted_to_it_and_no_more_than_it_has(born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    ledger = learner(born_from)
    phase = max((p for p in ledger.by_phase if p.startswith("forward") or p == at.LOSS), key=lambda p: ledger.by_phase[p])
    gates = [item for item in at.alive_in(ledger.lines, phase, tuple(ledger.by_phase)) if item.name == "layer: gate and up"
             and item.tensor.startswith("Q")]
    size = gates[0].tensor_bytes
    blocks = (Blocks(size, len(gates) + 3, ()), Blocks(123456789, 2, ()))
    rows = compare(record_of(tmp_path / "oom.json", born_from, requested=GIB, allocated=60 * GIB, blocks=blocks, phase="forward"))
    assert {row.name: row.measured for row in rows}["layer: gate and up"] == len(gates) * size


# Ways out


def test_ways_out_are_ranked_carry_peaks_and_costs_and_really_fit(born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    unfused = replace(born_from, road="unfused")
    ledger = learner(unfused)
    found = diagnose_record(record_of(
        tmp_path / "oom.json", unfused, requested=16 * GIB, allocated=80 * GIB, frames=("flex.py:905 sdpa_dense_backward",),
        fused=False, lines=ledger.lines, by_phase=ledger.by_phase))
    first, *others = found.remedies
    assert (first.set, first.fits) == ("--set train.attention=fused", True)
    assert first.peak_bytes == learner(replace(born_from, prefetch=True)).peak_bytes
    assert first.used_bytes is not None
    assert first.used_bytes <= CARD
    assert "16.00 GiB" in found.summary
    assert "B H 32 x Q 8,192 x N 16,384 x 4 B" in found.summary
    anchors = next(way for way in others if way.set.startswith("--set layout.anchors="))
    assert "256 blocks a row instead of 512" in anchors.cost
    assert "-50% supervised tokens/s" in anchors.cost
    assert [way.fits for way in found.remedies] == sorted((way.fits for way in found.remedies), reverse=True)


def test_where_no_single_way_fits_several_are_added_up(born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    ledger = colocated(born_from)
    options = {"requested": 2 * GIB, "allocated": ledger.peak_bytes - GIB, "lines": ledger.lines, "by_phase": ledger.by_phase,
               "roles": ledger.roles, "allowed_bytes": 45 * GIB}
    found = diagnose_record(record_of(tmp_path / "oom.json", born_from, **options))
    fitting = [way for way in found.remedies if way.fits]
    assert fitting
    assert fitting[0].set.split(" --set ") == ["--set placement.capture_cards=1", "features.precision=fp8"]
    assert fitting[0].cost.endswith("one more card for each drafter; features from a target in 8 bits")
    assert tuple(fitting) == found.remedies[: len(fitting)]


def test_what_the_plan_missed_is_missed_again(born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    ledger = learner(born_from)
    full = max(size for phase, size in ledger.by_phase.items() if "backward" in phase or phase == at.COLLECT)
    as_planned, above = (diagnose_record(record_of(tmp_path / "oom.json", born_from, requested=GIB, allocated=full + extra))
                         for extra in (0, 5 * GIB))
    used = [{way.set: way.used_bytes for way in found.remedies} for found in (as_planned, above)]
    assert used[1]["--set optimizer.state=8bit"] == used[0]["--set optimizer.state=8bit"] + 5 * GIB
    assert "5.00 GiB that the plan missed" in above.note
    room = next(way.used_bytes for way in as_planned.remedies if way.set == "--set optimizer.state=8bit")
    assert room is not None
    for extra, ok in ((0, True), (2**20, False)):
        tight = record_of(tmp_path / "oom.json", born_from, requested=GIB, allocated=full + extra, allowed_bytes=room)
        found = diagnose_record(tight)
        assert next(way.fits for way in found.remedies if "optimizer.state=8bit" in way.set) is ok


def test_what_others_hold_is_not_there_for_the_ways_out(born_from: Job) -> None:  # noqa: F811
    """The run of the log would fit the whole card; beside the other process's bytes it does not."""
    log = read_log(LOGS / "process-server.log")
    assert log.capacity is not None
    held = sum(used for _, used in log.others)
    found = diagnose_log(log, born_from, ("capture", "learn"))
    assert found.causes[0].name == "another process"
    sized = [way for way in found.remedies if way.used_bytes is not None]
    assert sized
    assert all(way.fits == (way.used_bytes <= log.capacity - held) for way in sized if way.used_bytes)
    assert any(log.capacity - held < way.used_bytes <= log.capacity for way in sized if way.used_bytes)


@pytest.mark.parametrize(("options", "way"), [
    ({"unused": 20 * GIB}, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
    ({"processes": (CardProcess(4242, "serve", 60 * GIB),)}, "end the other processes"),
    ({"growth": tuple((n, 20 * GIB + n * 2**29) for n in range(0, 20, 2))}, "what is kept from step to step must go"),
])
def test_what_no_setting_mends_says_what_does(options: dict[str, Any], way: str, diagnosed: Callable[..., Diagnosis]) -> None:
    assert way in diagnosed(**options).remedies[0].set


# Logs with a run file: the ledger of what went wrong


@pytest.mark.parametrize(("name", "cards", "line"), [
    ("attention-backward-dense", 1, "attention: score matrices"), ("attention-backward-dense", 0, "attention: score matrices"),
])
def test_a_log_with_its_run_names_the_line(name: str, cards: int, line: str) -> None:
    result = cli.doctor(record=None, log=LOGS / f"{name}.log", run=BORN_FROM, row_length=None,
                        settings=[*HERE, f"placement.capture_cards={cards}"])
    assert result["line"] == line
    assert result["lines"][0]["line_bytes"] == int(6.5 * 16 * GIB)  # that of the backward, where it died
    assert result["requested_bytes"] == 16 * GIB
    assert result["summary"].startswith("Attention ran unfused")
    assert "32 x Q 8,192 x N 16,384 x 4 B = 16.00 GiB" in result["summary"]
    assert result["remedies"][0]["set"] == "--set train.attention=fused"
    assert result["remedies"][0]["fits"]


def test_another_job_than_the_logs_claims_no_line(born_from: Job) -> None:  # noqa: F811
    found = diagnose_log(read_log(LOGS / "attention-backward-dense.log"), replace(born_from, anchors=300), ("capture", "learn"))
    assert found.matches == ()
    assert found.summary == found.causes[0].sentence


@pytest.mark.parametrize("name", ["shared-memory-triton", "host-kernel", "unrelated", "nccl-timeout-look-alike"])
def test_what_is_no_device_memory_gets_no_settings_of_the_ledger(name: str, born_from: Job) -> None:  # noqa: F811
    found = diagnose_log(read_log(LOGS / f"{name}.log"), born_from, ("capture", "learn"))
    assert (found.remedies, found.matches) == ((), ())


@pytest.mark.parametrize("path", sorted(LOGS.parent.glob("*logs/*.log")), ids=lambda path: path.stem)
def test_every_log_is_explained_with_and_without_a_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (None, BORN_FROM):
        result = cli.doctor(record=None, log=path, run=run, settings=HERE if run else None, row_length=None)
        json.dumps(result)
        assert {"ok", "checks", "cause", "line", "requested_bytes", "remedies"} <= result.keys()
        show_diagnosis(result)
        assert capsys.readouterr().out.startswith(result["summary"])


def test_the_command_reads_a_record(born_from: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    record_of(tmp_path / "oom.json", born_from, requested=16 * GIB, allocated=80 * GIB, held=planned_held(born_from))
    result = cli.doctor(record=tmp_path / "oom.json", log=None, run=None, settings=None, row_length=None)
    assert (result["ok"], result["cause"], result["requested_bytes"]) == (False, "too large", 16 * GIB)
    assert result["largest_surprise"]["name"] == REST
    show_diagnosis(result)
    shown = capsys.readouterr().out
    for text in (result["summary"], "Planned against measured", "Ways out", "attention was proven to run fused"):
        assert text in shown


@pytest.mark.parametrize(("options", "message_"), [
    ({"record": Path("x"), "log": Path("y")}, "--record x: it holds its run's settings"),
    ({"record": Path("x"), "settings": ["layout.anchors=8"]}, "--record x: it holds its run's settings"),
    ({"log": Path("y"), "settings": ["layout.anchors=8"]}, "are over a run file, and none is named"),
    ({"row_length": 64}, "are over a run file, and none is named"),
    ({"log": Path("nowhere.log")}, "nowhere.log: the log is missing"),
    ({"record": Path("nowhere.json")}, "record is missing"),
])
def test_bad_words(options: dict[str, Any], message_: str) -> None:
    with pytest.raises(UserError, match=message_):
        cli.doctor(**{"record": None, "log": None, "run": None, "settings": None, "row_length": None, **options})


def test_a_planned_run_whose_attention_ran_unfused_is_told_by_the_shape(diagnosed: Callable[..., Diagnosis]) -> None:
    """The ledger of the plan has no score matrices: nobody planned to have them."""
    found = diagnosed(requested=16 * GIB, allocated=80 * GIB, frames=("flex.py:905 sdpa_dense_backward",), fused=False,
                      blocks=(Blocks(16 * GIB, 4, ()),))
    assert found.causes[0].name == "unfused attention"
    assert (found.compared[0].name, found.compared[0].planned, found.compared[0].measured) == (
        "attention: score matrices", 0, 64 * GIB)
    assert "that the plan missed" not in found.note
    assert "'attention: score matrices', B H 32 x Q 8,192 x N 16,384 x 4 B = 16.00 GiB" in found.summary
    assert "train.attention was 'fused', and no tripwire was set" in found.note
    assert found.remedies[0].set == "--set train.attention=fused"
