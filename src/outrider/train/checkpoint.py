"""Takes a drafter, its optimizer and a position, gives whole checkpoints on disk and back; knows nothing of data or losses."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import UserError
from outrider.files import atomic_folder, explain_os_errors, read_json, sha256_file, write_json
from outrider.model.drafter import Drafter
from outrider.records import DrafterShape

FORMAT = 1
FILES = ("drafter.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` optimizer steps are done. Rows and anchors follow from it, so nothing else is needed."""

    step: int
    tau: float | None
    tau_step: int | None


def checkpoint_path(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """The run's checkpoints, oldest first. Interrupted writes have other names and are not among them."""
    return sorted((run_folder / "checkpoints").glob("step-????????"))


def save_checkpoint(
    run_folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, position: Position, *, target: str,
    inputs: dict[str, str], keep: int
) -> Path:
    """Write fp32 weights, both moments, the position and the shape, whole or not at all; then drop all but the last `keep`.

    `inputs`: a digest of the content behind each of the run file's paths (`section.key`), which must be the same to resume.
    Raises UserError when the disk refuses, FloatingPointError when a weight is not finite.
    """
    for name, weight in drafter.named_parameters():
        if not torch.isfinite(weight).all():
            raise FloatingPointError(f"{name} is not finite: no checkpoint was written, earlier ones are intact")
    folder = checkpoint_path(run_folder, position.step)
    with atomic_folder(folder) as temporary:
        save_file(dict(drafter.state_dict()), temporary / "drafter.safetensors")
        save_file(_moments(drafter, optimizer), temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", {"format": FORMAT, "position": asdict(position), "shape": asdict(drafter.shape),
                                              "target": target, "inputs": inputs})
        write_json(temporary / "manifest.json", {name: sha256_file(temporary / name) for name in FILES})
    _sweep(run_folder, keep)
    return folder


def _sweep(run_folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints, each renamed first so that none is ever half there, and killed writes."""
    with explain_os_errors(run_folder / "checkpoints"):
        for old in list_checkpoints(run_folder)[:-keep]:
            old.rename(old.with_name(f".{old.name}.partial"))
        for leftover in (run_folder / "checkpoints").glob(".step-*.partial"):
            shutil.rmtree(leftover)


def _moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {}
    for name, parameter in drafter.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{key}/{name}"] = value.detach().clone()
    return state


def verify_checkpoint(folder: Path) -> None:
    """Raises UserError when a file of the checkpoint is missing, cut or changed, or of another version."""
    manifest = read_json(folder / "manifest.json", what="the checkpoint's manifest")
    for name in FILES:
        file = folder / name
        if not isinstance(manifest, dict) or not file.is_file() or sha256_file(file) != manifest.get(name):
            raise UserError(f"{file}: the checkpoint is damaged (the file is missing, cut or changed): remove the folder "
                            f"{folder} and resume from the checkpoint before it")
    _read_state(folder)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    state = read_json(path, what="the checkpoint's state")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path}: was not written by this version of outrider: train again, or use the version that wrote it")
    return state


def load_shape(folder: Path) -> tuple[DrafterShape, str]:
    """The shape of a checkpoint's drafter and the target it was trained for. Raises UserError."""
    state = _read_state(folder)
    try:
        shape = state["shape"]
        return DrafterShape(**{**shape, "target_layer_ids": tuple(shape["target_layer_ids"]),
                               "layer_types": tuple(shape["layer_types"])}), state["target"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / 'state.json'}: the checkpoint's state lacks what describes its drafter ({error}): restore "
                        "the file or use another checkpoint") from error


def resume_checkpoint(folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, *, inputs: dict[str, str]) -> Position:
    """Load weights and both moments in place and return the position, exactly as they were saved.

    Raises UserError when the checkpoint is damaged, or was made from other `inputs` (see `save_checkpoint`).
    """
    verify_checkpoint(folder)
    before = _read_state(folder)["inputs"]
    for name in sorted(before.keys() | inputs.keys()):
        if before.get(name) != inputs.get(name):
            raise UserError(f"{name}: what it names has changed since {folder} was written: bring it back, or train in another "
                            "folder")
    drafter.load_state_dict(load_file(folder / "drafter.safetensors"))
    moments = load_file(folder / "optimizer.safetensors")
    for name, parameter in drafter.named_parameters():
        keys = {key.split("/", 1)[0] for key in moments if key.split("/", 1)[1] == name}
        optimizer.state[parameter] = {key: moments[f"{key}/{name}"].to(_home(key, parameter)) for key in keys}
    return Position(**_read_state(folder)["position"])


def _home(key: str, parameter: Tensor) -> torch.device:
    return parameter.device if key != "step" or parameter.is_cuda else torch.device("cpu")
