"""The record of an out-of-memory: written whole, read back equal, refused where it is not one."""

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ledger import BORN_FROM, born_from  # noqa: F401 - the fixture

from outrider.cli import doctor
from outrider.config import load_run
from outrider.errors import UserError
from outrider.planner.doctor import readings, record, recording
from outrider.planner.doctor.record import Blocks, CardProcess, Moment, Record
from outrider.planner.job import Job
from outrider.planner.ledger import learner
from outrider.show import show_diagnosis

MESSAGE = "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 94.97 GiB of which 10.90 GiB is free."


def made(path: Path, job: Job, **changes: Any) -> Record:
    """A record written where there is no GPU, with `changes` to what was read."""
    weight = torch.zeros(300, 7)
    held = {"drafter: masters": [weight, weight[:10], torch.zeros(3)]}
    try:
        raise torch.OutOfMemoryError(MESSAGE)
    except RuntimeError as error:
        moment = Moment("backward", 7, True, ((5, 5), (6, 5), (7, 6)))
        planned = recording.Planned(load_run(BORN_FROM).model_dump(mode="json"), job, learner(job))
        recording.write(path, error, moment=moment, planned=planned, held=held, device=torch.device("cpu"))
    changed = replace(record.read(path), **changes)
    path.write_text(json.dumps(asdict(changed)), encoding="utf-8")
    return changed


def test_a_record_reads_back_as_it_was_written(born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    found = made(tmp_path / "oom.json", born_from)
    assert found == record.read(tmp_path / "oom.json")
    assert found.job == born_from
    assert found.lines == learner(born_from).lines
    assert found.held == {"drafter: masters": 4 * (300 * 7 + 3)}  # a view is not counted twice
    assert found.error == "torch.OutOfMemoryError"
    assert found.frames[-1].endswith("made")
    assert found.versions["torch"] == torch.__version__


@pytest.mark.parametrize(("content", "message"), [
    ("{}", "no out-of-memory record"), ("[1]", "no out-of-memory record"), ("{", "not valid JSON"), ("", "not valid JSON"),
    ('{"schema": 4, "versions": {"outrider": "9.1"}}', r"schema = 4, written by outrider 9.1: this version reads 3"),
    ('{"schema": "\\n1", "versions": 3}', "this version reads 3"), ('{"schema": 3}', "damaged out-of-memory record, written:"),
])
def test_what_is_no_record_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "oom.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        record.read(tmp_path / "oom.json")


@pytest.mark.parametrize(("key", "value"), [
    ("lines", [{"name": 3}]), ("job", {}), ("held", {"a": "b"}), ("frames", "text"), ("free_bytes", "many"), ("moment", None),
    ("blocks", [{"bytes": 1, "count": 1}]),
])
def test_a_damaged_record_names_the_field(key: str, value: object, born_from: Job, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "oom.json"
    made(path, born_from)
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), key: value}), encoding="utf-8")
    with pytest.raises(UserError, match=f"damaged out-of-memory record, {key}"):
        record.read(path)


WRONG = (0, -1, math.nan, "x", [], None, 1e300)
Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where each value of a document stands, those that hold others too."""
    if place:
        yield place
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*place, key))


def put(document: Any, place: Place, value: Any) -> Any:
    """Puts `value` at the place, gives what stood there."""
    *path, last = place
    for key in path:
        document = document[key]
    before, document[last] = document[last], value
    return before


@pytest.fixture
def whole(born_from: Job, tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    """The document of a record with something in each of its fields, of a drafter with one layer and a target with four."""
    drafter = replace(born_from.drafter, num_layers=1, layer_types=born_from.drafter.layer_types[:1], target_layer_ids=(1,),
                      num_target_layers=4)
    job = replace(born_from, anchors=64, drafter=drafter, target=replace(born_from.target, layers=born_from.target.layers[:4]))
    counts = dict.fromkeys(record.STATISTICS, 2**34)
    made(tmp_path / "oom.json", job, settings={"train": {"seed": 2**63 - 1}}, lines=learner(job).lines[::4], statistics=counts,
         total_bytes=2**36, allowed_bytes=2**36, free_bytes=2**30,
         blocks=(Blocks(2**24, 3, ("a.py:1 f",)),), processes=(CardProcess(7, "serve", 2**34),))
    document: dict[str, Any] = json.loads((tmp_path / "oom.json").read_text(encoding="utf-8"))
    return document


def test_a_wrong_value_anywhere_is_refused_or_diagnosed(
    whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field in turn, of list items alike one that the seed picks."""
    path, kinds = tmp_path / "oom.json", defaultdict(list)
    monkeypatch.setattr(record, "read_json", lambda path, what: whole)  # a thousand files take longer than all the rest
    for place in places(whole):
        kinds[tuple("*" if isinstance(key, int) else key for key in place)].append(place)
    seeded, refusals, diagnosed = random.Random(0), [], 0
    for kind, alike in kinds.items():
        if kind[0] == "settings" and len(kind) > 1:
            continue  # kept for a reader; the diagnosis does not look at them
        for value in WRONG:
            place = seeded.choice(alike)
            before = put(whole, place, value)
            try:
                show_diagnosis(doctor(record=path, log=None, run=None, settings=None, row_length=None))
                diagnosed += 1
            except UserError as error:
                refusals.append(str(error))
            except Exception as error:
                raise AssertionError(f"{place} = {value!r}: {type(error).__name__}: {error}") from error
            put(whole, place, before)
    assert len(refusals) > 500
    assert all(text.startswith(f"{path}: ") and "\n" not in text for text in refusals)
    assert diagnosed > 50


@pytest.mark.parametrize(("place", "value", "said"), [
    (("job", "rows"), 0, "job.rows = 0: must lie in 1..9007199254740992"),
    (("job", "drafter", "hidden_size"), -1, "job.drafter.hidden_size = -1: must lie in 1..1048576"),
    (("job", "drafter", "num_kv_heads"), 0, "job.drafter.num_kv_heads = 0: must lie in 1..65536"),
    (("lines", 0, "count"), math.nan, "lines.0.count = NaN: must lie in 0..9007199254740992"),
    (("lines", 0, "first"), "x", 'lines.0.first = "x": must be a phase of by_phase'),
    (("lines", 0, "dtype"), "bytes", 'lines.0.dtype = "bytes": must be one of float32, '),
    (("job", "target_dtype"), "x", "job.target_dtype = \"x\": must be 'float32' or 'bfloat16'"),
    (("job", "target", "layers"), [], "job.target.layers: are 0, must be job.drafter.num_target_layers = "),
    (("job", "drafter", "head_dim"), 3, "job.drafter: drafter.head_dim = 3: must be even"),
    (("moment", "phase"), "x", 'moment.phase = "x": must be one of load, capture, '),
    (("roles",), ["capture", "capture"], 'roles = ["capture", "capture"]: must be one of ["capture", "learn"], '),
    (("statistics",), {"retries": 1}, "statistics: must name all of allocated_bytes, "),
    (("by_phase",), {"load": 1}, "by_phase: must name the phases of a step of "),
    (("free_bytes",), "many", 'free_bytes = "many": must be a valid integer'),
])
def test_a_wrong_value_is_named_with_its_rule(
    place: Place, value: object, said: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "oom.json"
    put(whole, place, value)
    path.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(UserError) as refusal:
        record.read(path)
    assert f"{path}: a damaged out-of-memory record, {said}" in str(refusal.value)
    assert str(refusal.value).endswith(": restore the file, or give the run's log with --log")


def test_a_missing_record_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="out-of-memory record is missing"):
        record.read(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="not valid JSON"):
        record.read(tmp_path / "binary")


def test_blocks_alike_are_counted_together() -> None:
    frames = [{"filename": "alloc.cpp", "line": 1, "name": "malloc"}, {"filename": "step.py", "line": 9, "name": "run_step"}]
    used = {"state": "active_allocated", "size": 1024, "requested_size": 1000}
    groups, free = readings.group_blocks([
        {"blocks": [used, used, {"state": "inactive", "size": 4096}]},
        {"blocks": [{**used, "frames": frames}, {"state": "inactive", "size": 8192},
                    {"state": "active_pending_free", "size": 1}]},
    ])
    assert free == 8192
    assert groups == (Blocks(1000, 2, ()), Blocks(1000, 1, ("step.py:9 run_step",)))


def test_processes_of_one_card() -> None:
    rows = ["GPU-aa, 12, python3, 512", "GPU-bb, 13, python3, 1024", "GPU-aa, 14, serve, with comma, [N/A]"]
    assert readings.parse_processes(rows, uuid="aa") == (
        CardProcess(12, "python3", 512 * 2**20), CardProcess(14, "serve,with comma", None))
