"""Takes a record, a log or this machine, with a run file or none, joins what the doctor needs of rooms apart from the planner."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.cli.training import job_of
from outrider.config import load_run
from outrider.errors import UserError


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
    job, roles = _where(resolved.config, job)
    return as_dict(diagnose_log(log, job, roles), log, path)


def _where(config: Any, job: Any) -> tuple[Any, Any]:
    """The job with what its placement adds, and the roles of the device that learns."""
    apart = config.placement.capture_cards > 0 or config.features.server is not None
    return replace(job, prefetch=apart), ("learn",) if apart else ("capture", "learn")


def look_at_machine(run: Path | None, settings: Sequence[str], row_length: int | None) -> dict[str, Any]:
    """Is this machine sound, and for this run?"""
    from outrider.planner.doctor.machine import Asked, look_at
    from outrider.planner.ledger import host
    from outrider.planner.target_shapes import LINEAR
    from outrider.train.host_memory import available_bytes

    if run is None:
        shape, dtype, asked, needed = None, "bfloat16", None, 0
    else:
        device = load_run(run, settings).train.device
        resolved, job = job_of(run, settings, row_length=row_length, suppositions=())
        config, shape, dtype = resolved.config, resolved.shape, resolved.config.train.precision
        job, roles = _where(config, job)
        needed = sum(line.bytes for line in host(job))  # a checkpoint, copied before it is written
        asked = Asked(
            job=job, roles=roles, target=config.target.path, rows=config.data.rows, heldout=config.data.heldout,
            folder=config.train.folder, kernel_cache=config.features.kernel_cache,
            disk_bytes=(config.checkpoint.keep_last + 1) * needed + int(config.guards.min_free_gib * 2**30),
            cuda=device != "cpu", fused=device != "cpu" and config.train.attention == "fused",
            linear=any(layer.kind == LINEAR for layer in job.target.layers[: job.captured]),
        )
    found = look_at(asked, self_test=lambda: _self_test(shape, dtype), host_free=available_bytes(), host_needed=needed)
    return {"ok": all(finding.ok is not False for finding in found), "run": None if run is None else str(run),
            "checks": [asdict(finding) for finding in found]}


def _self_test(shape: Any, dtype: str) -> str:
    """The fused attention against float64, on the run's own heads or on usual ones. Raises UserError."""
    import torch

    from outrider.features.target import DTYPES
    from outrider.model.fused_attention import kernels_for
    from outrider.train.selftest import check_fused_attention

    shape = shape or usual_shape()
    device = torch.device("cuda", 0)
    try:
        kernels = kernels_for(device, head_dim=shape.head_dim, dtype=DTYPES[dtype])
        check_fused_attention(shape, kernels, dtype=DTYPES[dtype], device=device)
    except UserError:
        raise
    except Exception as error:  # what a compiler raises has no one kind
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{type(error).__name__}: {first}: the fused attention does not compile here: look at triton and torch, "
                        "or train with train.attention = 'dense'") from error
    heads = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
    return f"{kernels.name} kernels: values and gradients are right within the tolerance, {heads}"


def usual_shape() -> Any:
    """A drafter with heads as published ones have them, where no run says which."""
    from outrider.records import FULL, DrafterShape

    return DrafterShape(
        hidden_size=4096, intermediate_size=12288, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1e6, vocab_size=32, max_position_embeddings=32768, block_size=16, mask_token_id=0, target_layer_ids=(1,),
        num_target_layers=4, tie_word_embeddings=False, layer_types=(FULL,),
    )
