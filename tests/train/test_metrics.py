"""The metrics file of a run that goes on."""

from pathlib import Path

import pytest

from outrider.train.metrics import METRICS_NAME, Metrics


def test_damaged_lines_end_no_run(tmp_path: Path) -> None:
    lines = b'{"step": 1, "loss": 3.0}\ngarbage\n\xff\xfe\n{"step": 2, "loss": null}\n{"step": 3, "loss": 2.5}\n'
    (tmp_path / METRICS_NAME).write_bytes(lines)
    metrics = Metrics(tmp_path, None, at_bytes=len(lines), at_step=3, writes=True)
    assert list(metrics.losses) == [3.0, 2.5]
    metrics.log({"step": 4, "loss": 2.0})
    assert (tmp_path / METRICS_NAME).read_bytes() == lines + b'{"step": 4, "loss": 2.0}\n'


def test_a_line_that_a_lost_end_cut_in_half_is_not_joined_to_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / METRICS_NAME).write_bytes(b'{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    metrics = Metrics(tmp_path, None, at_bytes=500, at_step=20, writes=True)
    said = "has 40 bytes where the checkpoint counted 500: some lines were lost, the run itself is whole"
    assert said in capsys.readouterr().err
    metrics.log({"step": 21, "loss": 2.0})
    assert (tmp_path / METRICS_NAME).read_bytes() == b'{"step": 1, "loss": 3.0}\n{"step": 21, "loss": 2.0}\n'
    assert metrics.size == 51
