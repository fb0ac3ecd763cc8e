"""Takes a run file and cards by name, joins what a plan and the time line of many cards need of planner and report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.cli.training import job_of
from outrider.errors import UserError
from outrider.files import check_out_file


@dataclass(frozen=True)
class Cards:
    """The cards to plan for: by name (None: those found here), with the `rates` of a file, or measured now and kept in
    `calibrate`."""

    gpus: str | None
    rates: Path | None
    calibrate: Path | None


@dataclass(frozen=True)
class Wanted:
    """What is planned: one `placement` or all (None), rows of `row_length` (None: the run's own), what is supposed, whether
    settings may `vary`, whether to `explain` every line."""

    placement: str | None
    row_length: int | None
    suppositions: Sequence[str]
    vary: bool
    explain: bool


@dataclass(frozen=True)
class Ahead:
    """What `--simulate` asks for: a number of `gpus` (None: nothing), a run's folder or file of `times`, a `page` to draw."""

    gpus: int | None
    times: Path | None
    page: Path | None


def plan_from(run: Path, settings: Sequence[str], cards: Cards, wanted: Wanted, ahead: Ahead) -> dict[str, Any]:
    """The plan of a run file, and with `ahead` its simulation under `simulated`. Raises UserError."""
    from outrider.planner.measured import read_measured
    from outrider.planner.outlook import Case, look_ahead
    from outrider.planner.run import plan_run

    for name, given in (("--times", ahead.times), ("--page", ahead.page)):
        if given is not None and ahead.gpus is None:
            raise UserError(f"{name} {given}: belongs to --simulate: say how many GPUs, such as --simulate 8")
    if ahead.page is not None:
        from outrider.report.timeline import FORMS, write_outlook

        check_out_file(ahead.page, "--page", endings=FORMS)
    measured = read_measured(ahead.times) if ahead.times is not None else None
    gpus, rates = _known(cards)
    resolved, job = job_of(run, settings, row_length=wanted.row_length, suppositions=wanted.suppositions)
    if ahead.gpus is not None and job.served:
        raise UserError(f"--simulate {ahead.gpus}: how fast features.server is cannot be planned: leave one of them out")
    if cards.calibrate is not None:
        gpus, rates = _measured(cards.calibrate, job)
    result = plan_run(job, gpus, placement=wanted.placement, vary=wanted.vary, explain=wanted.explain)
    if rates is not None:
        result |= {"rates": asdict(rates), "times": f"from rates measured on {rates.card} ({rates.text}) and the shares of them "
                                                    "reached on one H200: see docs/plan.md"}
    if ahead.gpus is None:
        return result
    case = Case(job, gpus[0], len(gpus), measured, resolved.config.placement, wanted.placement)
    simulated = look_ahead(case, ahead.gpus)
    if ahead.page is not None:
        write_outlook(ahead.page, simulated)
        simulated["page"] = str(ahead.page)
    return {**result, "simulated": simulated}


def _known(cards: Cards) -> tuple[list[Any], Any]:
    """The cards, and the rates of their file. None yet where they are to be measured, which needs the run's sizes."""
    from outrider.planner.gpus import found_gpus, parse_gpus

    if cards.calibrate is not None:
        for name, given in (("--gpus", cards.gpus), ("--rates", cards.rates)):
            if given is not None:
                raise UserError(f"--calibrate {cards.calibrate}: measures the cards of this machine: leave {name} out")
        _check_calibration(cards.calibrate)
        return [], None
    rates = measured = None
    if cards.rates is not None:
        from outrider.planner.calibration import as_gpu, read_rates

        rates = read_rates(cards.rates)
        measured = as_gpu(rates)
    found = found_gpus(measured=measured) if cards.gpus is None else parse_gpus(cards.gpus, measured=measured)
    if rates is not None and found and not all(gpu.measured for gpu in found):
        raise UserError(f"--rates {cards.rates}: are of {rates.card}, the cards are {found[0].name}: leave --rates out, or "
                        "measure there with --calibrate")
    return found, rates


def _check_calibration(path: Path) -> None:
    """Refuse before 30 s are spent: a place that cannot be written, a machine without a card."""
    import torch

    from outrider.files import check_out_file

    if not torch.cuda.is_available():
        raise UserError(f"--calibrate {path}: no CUDA device is here to measure: plan with --gpus, or run it where one is")
    check_out_file(path, "--calibrate", endings=(".json",))


def _measured(path: Path, job: Any) -> tuple[list[Any], Any]:
    """The cards here, of rates measured now on the drafter's largest products and kept at `path`."""
    import torch

    from outrider.planner.calibration import as_gpu, measure, write_rates
    from outrider.planner.gpus import found_gpus

    shape = job.drafter
    rates = measure(torch.device("cuda", 0), (job.queries, shape.hidden_size, 2 * shape.intermediate_size))
    write_rates(path, rates)
    return found_gpus(measured=as_gpu(rates)), rates
