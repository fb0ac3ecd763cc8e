"""Takes a run file's config and cards, gives what `outrider plan` prints and returns; loads no weights."""

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.config import RunConfig
from outrider.data.info import read_info
from outrider.errors import UserError
from outrider.planner.gpus import Gpu
from outrider.planner.job import SUPPOSITIONS, Job, job_of
from outrider.planner.ledger import DeviceLedger, host
from outrider.planner.lines import Line
from outrider.planner.plan import PLACEMENTS, DevicePlan, Plan, make_plans
from outrider.planner.target_shapes import read_target_shape
from outrider.records import DrafterShape

ROW_LENGTH = 8192  # planned with where the rows are not prepared yet
GIB = 2**30


def job_from(
    config: RunConfig, drafter: DrafterShape, *, row_length: int | None, suppositions: Sequence[str]
) -> Job:
    """The job of a resolved run. `row_length` None takes that of the rows, or ROW_LENGTH where there are none yet."""
    for name in suppositions:
        if name not in SUPPOSITIONS:
            raise UserError(f"--suppose {name}: must be one of {', '.join(SUPPOSITIONS)}")
    if row_length is None:
        row_length = int(read_info(config.data.rows)["row_length"]) if config.data.rows.is_dir() else ROW_LENGTH
    elif row_length < 1:
        raise UserError(f"--row-length {row_length}: must be at least 1")
    return job_of(config, drafter, read_target_shape(config.target.path), row_length=row_length, replicas=1, sharded=False,
                  suppositions=suppositions)


def plan_run(job: Job, gpus: Sequence[Gpu], *, placement: str | None, vary: bool, explain: bool) -> dict[str, Any]:
    """Every placement of the job on the cards, best first, as `outrider plan --json` gives them.

    A run with held-out prompts keeps the whole target, for the acceptance check; else it ends at the last captured layer.
    """
    if placement is not None and placement not in PLACEMENTS:
        raise UserError(f"--placement {placement}: must be one of {', '.join(PLACEMENTS)}")
    if placement is not None and job.served:
        raise UserError(f"--placement {placement}: features.server has the target elsewhere: leave one of them out")
    plans = make_plans(job, gpus, placements=PLACEMENTS if placement is None else (placement,), vary=vary)
    best, *others = plans
    return {
        **as_dict(best, explain=True), "alternatives": [as_dict(plan, explain=explain) for plan in others],
        "gpus": {"count": len(gpus), "name": gpus[0].name, "usable_bytes": gpus[0].usable_bytes},
        "job": {"row_length": job.row_length, "rows_per_batch": job.rows, "anchors": job.anchors,
                "accumulation": job.accumulation, "block_size": job.drafter.block_size, "road": job.road,
                "drafter_parameters": job.parameters,
                "target_parameters": job.target.parameters, "target_layers_run": job.captured},
        "explain": explain, "times": "from stated rates and the shares of them reached on one H200: see docs/plan.md",
    }


def as_dict(plan: Plan, *, explain: bool) -> dict[str, Any]:
    """One plan in plain values; with `explain` every line of every device."""
    return {
        "placement": plan.placement, "changes": dict(plan.changes), "fits": plan.fits, "verdict": verdict(plan),
        "gpus": plan.gpus, "headroom_bytes": plan.headroom, "step_ms": plan.step_ms, "stages_ms": dict(plan.stages),
        "bottleneck": plan.bottleneck,
        "supervised_tokens_per_s": plan.supervised_tokens_per_s, "tokens_per_s": plan.tokens_per_s,
        "devices": [_device(device, explain=explain) for device in plan.devices],
        "host_bytes": sum(line.bytes for line in host(plan.job)),
        "host_lines": [_line(line) for line in (host(plan.job) if explain else ())],
    }


def verdict(plan: Plan) -> str:
    """Whether the plan fits, and by how much; where it does not, which line makes it too much and how that line comes about."""
    settings = "".join(f", {key}={value}" for key, value in plan.changes.items())
    named = f"{plan.placement}{settings}"
    if plan.fits:
        server = ", where the server gives features as fast" if plan.job.served else ""
        return (f"{named}: fits with {plan.headroom / GIB:.1f} GiB to spare, {plan.supervised_tokens_per_s:,.0f} supervised "
                f"tokens/s ({plan.tokens_per_s:,.0f} row tokens/s{server})")
    fullest = min(plan.devices, key=lambda device: device.headroom)
    line = telling_line(fullest.ledger)
    return (f"{named}: does not fit, {-plan.headroom / GIB:.1f} GiB too much on the {fullest.ledger.role} card in "
            f"'{fullest.ledger.peak_phase}', most of all '{line.name}', {line.bytes / GIB:.1f} GiB ({line.bytes:,} bytes) = "
            f"{line.formula}")


def telling_line(ledger: DeviceLedger) -> Line:
    """The largest line at the fullest moment that is not there for the whole run, for what stands cannot be another."""
    at_peak = ledger.at_peak()
    return next((line for line in at_peak if line.lifetime != "whole run"), at_peak[0])


def _device(device: DevicePlan, *, explain: bool) -> dict[str, Any]:
    ledger, line = device.ledger, telling_line(device.ledger)
    return {
        "name": device.gpu.name, "role": ledger.role, "count": device.count, "usable_bytes": device.gpu.usable_bytes,
        "peak_bytes": ledger.peak_bytes, "peak_phase": ledger.peak_phase, "device_used_bytes": ledger.device_used_bytes,
        "standing_bytes": ledger.standing_bytes, "headroom_bytes": device.headroom, "groups_at_peak": groups(device),
        "largest_at_peak": {"name": line.name, "formula": line.formula, "bytes": line.bytes},
        "lines": [_line(line) for line in (ledger.lines if explain else ())],
    }


def _line(line: Line) -> dict[str, Any]:
    return {"name": line.name, "formula": line.formula, "dtype": line.dtype, "bytes": line.bytes, "phase": line.lifetime,
            "inside": line.inside}


def groups(device: DevicePlan) -> dict[str, int]:
    """What stands on the card at its peak, by what a person would call it, in bytes."""
    return grouped([*device.ledger.at_peak(), *(line for line in device.ledger.lines if not line.inside)])


def grouped(lines: Iterable[Line]) -> dict[str, int]:
    """Bytes of lines by their kind, largest first."""
    found: dict[str, int] = {}
    for line in lines:
        found[group_of(line.name)] = found.get(group_of(line.name), 0) + line.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def group_of(name: str) -> str:
    """The kind of a line: weights of either model, optimizer, gradients, features, scores, activations, overhead."""
    for start, group in (
        ("target forward", "target's forward"), ("target", "target's weights"), ("drafter", "drafter's weights"),
        ("optimizer", "optimizer"), ("gradients", "gradients"), ("gradient not", "gradients"), ("features", "features"),
        ("hidden states that", "features"),
        ("attention: score", "score matrices"), ("logits", "logits"), ("loss", "loss"), ("cuBLAS", "libraries"),
        ("CUDA", "libraries"), ("NCCL", "libraries"), ("gaps", "gaps"), ("check", "acceptance check"),
    ):
        if name.startswith(start):
            return group
    return "activations"
