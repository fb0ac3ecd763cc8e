"""The tracker gets what metrics.jsonl gets, as scalars."""

import sys
from pathlib import Path

import pytest

from outrider.errors import UserError
from outrider.train.tracker import open_tracker, scalars


def test_lists_are_numbered_from_slot_one_and_dictionaries_named() -> None:
    line = {"step": 3, "loss": 2.5, "slot_accuracy": [0.5, 0.25], "seconds": {"capture": 1.0}, "note": "text"}
    assert scalars(line) == {"loss": 2.5, "slot_accuracy/1": 0.5, "slot_accuracy/2": 0.25, "seconds/capture": 1.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_tensorboard_holds_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = open_tracker("tensorboard", tmp_path, first_step=0)
    tracker.log({"step": 1, "loss": 2.5, "slot_accuracy": [0.5]})
    tracker.log({"step": 2, "loss": 1.5, "slot_accuracy": [0.75]})
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [e.value for e in events.Scalars("slot_accuracy/1")] == [0.5, 0.75]


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="pip install"):
        open_tracker("tensorboard", tmp_path, first_step=0)
    open_tracker(None, tmp_path, first_step=0).log({"step": 1})
