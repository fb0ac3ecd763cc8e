"""Takes a run file and cards by name, joins what a plan and the time line of many cards need of planner and report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cli.training import job_of
from outrider.errors import UserError
from outrider.files import check_out_file


@dataclass(frozen=True)
class Ahead:
    """What `--simulate` asks for: a number of `gpus` (None: nothing), a run's folder or file of `times`, a `page` to draw."""

    gpus: int | None
    times: Path | None
    page: Path | None


def plan_from(
    run: Path, gpus: str | None, settings: Sequence[str], *, placement: str | None, row_length: int | None,
    suppositions: Sequence[str], vary: bool, explain: bool, ahead: Ahead
) -> dict[str, Any]:
    """The plan of a run file, and with `ahead` its simulation under `simulated`. Raises UserError."""
    from outrider.planner.gpus import found_gpus, parse_gpus
    from outrider.planner.measured import read_measured
    from outrider.planner.outlook import look_ahead
    from outrider.planner.run import plan_run

    for name, given in (("--times", ahead.times), ("--page", ahead.page)):
        if given is not None and ahead.gpus is None:
            raise UserError(f"{name} {given}: belongs to --simulate: say how many GPUs, such as --simulate 8")
    if ahead.page is not None:
        from outrider.report.timeline import FORMS, write_outlook

        check_out_file(ahead.page, "--page", endings=FORMS)
    measured = read_measured(ahead.times) if ahead.times is not None else None
    cards = parse_gpus(gpus) if gpus is not None else found_gpus()
    resolved, job = job_of(run, settings, row_length=row_length, suppositions=suppositions)
    result = plan_run(job, cards, placement=placement, vary=vary, explain=explain)
    if ahead.gpus is None:
        return result
    simulated = look_ahead(job, cards[0], len(cards), ahead.gpus, measured, resolved.config.placement, placement)
    if ahead.page is not None:
        write_outlook(ahead.page, simulated)
        simulated["page"] = str(ahead.page)
    return {**result, "simulated": simulated}
