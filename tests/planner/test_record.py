"""The record of an out-of-memory: written whole, read back equal, refused where it is not one."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ledger import BORN_FROM, born_from  # noqa: F401 - the fixture

from outrider.config import load_run
from outrider.errors import UserError
from outrider.planner.doctor import readings, record
from outrider.planner.doctor.record import Moment, Record
from outrider.planner.job import Job
from outrider.planner.ledger import learner

MESSAGE = "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 94.97 GiB of which 10.90 GiB is free."


def made(path: Path, job: Job, **changes: Any) -> Record:
    """A record written where there is no GPU, with `changes` to what was read."""
    weight = torch.zeros(300, 7)
    held = {"drafter: masters": [weight, weight[:10], torch.zeros(3)]}
    try:
        raise torch.OutOfMemoryError(MESSAGE)
    except RuntimeError as error:
        moment = Moment("backward", 7, True, ((5, 5), (6, 5), (7, 6)))
        record.write(path, error, moment=moment, job=job, ledger=learner(job), held=held,
                     settings=load_run(BORN_FROM).model_dump(mode="json"), device=torch.device("cpu"), allowed_share=1.0)
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
    assert groups == (readings.Blocks(1000, 2, ()), readings.Blocks(1000, 1, ("step.py:9 run_step",)))


def test_processes_of_one_card() -> None:
    rows = ["GPU-aa, 12, python3, 512", "GPU-bb, 13, python3, 1024", "GPU-aa, 14, serve, with comma, [N/A]"]
    assert readings.parse_processes(rows, uuid="aa") == (
        readings.CardProcess(12, "python3", 512 * 2**20), readings.CardProcess(14, "serve,with comma", None))
