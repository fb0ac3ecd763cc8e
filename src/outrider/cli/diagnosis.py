"""Takes a record or a log, with a run file or none, joins what the doctor needs of rooms apart from the planner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.cli.training import job_of


def explain_record(path: Path) -> dict[str, Any]:
    """Why the run that left this record ran out of memory."""
    from outrider.planner.doctor import record
    from outrider.planner.doctor.diagnosis import as_dict, diagnose_record

    return as_dict(diagnose_record(record.read(path)), None, path)


def explain_log(path: Path, run: Path | None, settings: Sequence[str], row_length: int | None) -> dict[str, Any]:
    """Why the run that printed this log ran out of memory, by the ledger of its run file if there is one."""
    from outrider.planner.doctor.diagnosis import as_dict, diagnose_log
    from outrider.planner.doctor.log import read_log

    log = read_log(path)
    if run is None:
        return as_dict(diagnose_log(log, None, ()), log, path)
    resolved, job = job_of(run, settings, row_length=row_length, suppositions=())
    apart = resolved.config.placement.capture_cards > 0
    return as_dict(diagnose_log(log, replace(job, prefetch=apart), ("learn",) if apart else ("capture", "learn")), log, path)
