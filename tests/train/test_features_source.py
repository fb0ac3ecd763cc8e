"""A run trained on features made and kept in other ways: the same run where that must be, a refusal where it cannot be."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from outrider.config import RunConfig
from outrider.errors import UserError
from outrider.train.loop import train

MakeRun = Callable[..., RunConfig]


def losses(run: RunConfig) -> list[float]:
    return [json.loads(line)["loss"] for line in (run.train.folder / "metrics.jsonl").read_text().splitlines()]


def test_kept_on_disk_is_the_same_run(make_run: MakeRun) -> None:
    """Bit for bit, over two epochs and a stop between them: the later steps read what the first ones wrote."""
    online = make_run("online", **{"train.rows_per_batch": 1})
    train(online, check=None)
    stored: dict[str, Any] = {"train.rows_per_batch": 1, "features.keep": "disk"}
    train(make_run("stored", **stored | {"train.steps": 5}), check=None)
    folder = make_run("stored").train.folder / "features"
    written = {file.name: file.stat().st_mtime_ns for file in folder.glob("row-*")}
    assert written
    run = make_run("stored", **stored)
    with pytest.raises(UserError, match=r"train\.steps"):
        train(run, check=None)  # another length of schedule is another run
    again = make_run("again", **stored, **{"features.store": str(folder)})
    train(again, check=None)
    assert losses(again) == losses(online)
    assert {name: (folder / name).stat().st_mtime_ns for name in written} == written, "written once"


def test_a_damaged_row_of_the_store_is_set_aside_and_captured_again(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    train(make_run("first", **{"features.keep": "disk"}), check=None)
    folder = make_run("first").train.folder / "features"
    kept = sorted(folder.glob("row-*"))
    whole = kept[0].read_bytes()
    kept[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = make_run("again", **{"features.keep": "disk", "features.store": str(folder)})
    train(again, check=None)
    assert f"{kept[0].name}: its checksum does not match; renamed to {kept[0].name}.damaged" in capfd.readouterr().err
    assert kept[0].read_bytes() == whole
    assert losses(again) == losses(make_run("first"))


def test_packed_documents_train_alike(make_run: MakeRun) -> None:
    exact: dict[str, Any] = {"train.precision": "float32"}  # bfloat16 products of a training step would widen the last bits
    apart, packed = make_run("apart", **exact), make_run("packed", **exact, **{"features.documents": "packed"})
    train(apart, check=None)
    train(packed, check=None)
    assert losses(packed) == pytest.approx(losses(apart), rel=1e-4)


def test_fp8_features_train(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    exact, rough = make_run("exact"), make_run("rough", **{"features.precision": "fp8"})
    train(exact, check=None)
    train(rough, check=None)
    assert "linear layers in 8 bits" in capsys.readouterr().err
    assert losses(rough) != losses(exact)
    assert losses(rough) == pytest.approx(losses(exact), rel=0.2)
    with pytest.raises(UserError, match=r"features\.precision \(fp8 -> as_loaded\)"):
        train(make_run("rough"), check=None)
