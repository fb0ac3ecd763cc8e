"""The metrics file of a run that goes on."""

from pathlib import Path

from outrider.train.metrics import METRICS_NAME, Metrics


def test_damaged_lines_end_no_run(tmp_path: Path) -> None:
    lines = b'{"step": 1, "loss": 3.0}\ngarbage\n\xff\xfe\n{"step": 2, "loss": null}\n{"step": 3, "loss": 2.5}\n'
    (tmp_path / METRICS_NAME).write_bytes(lines)
    metrics = Metrics(tmp_path, None, at_bytes=len(lines), at_step=3, writes=True)
    assert list(metrics.losses) == [3.0, 2.5]
    metrics.log({"step": 4, "loss": 2.0})
    assert (tmp_path / METRICS_NAME).read_bytes() == lines + b'{"step": 4, "loss": 2.0}\n'
