"""Takes a drafter, its optimizer and a position, gives whole checkpoints on disk and back; knows nothing of data or losses."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import UserError
from outrider.files import atomic_folder, read_json, sha256_file, write_json
from outrider.model.drafter import Drafter
from outrider.records import DrafterShape

FORMAT = 1


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
    run_folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, position: Position, *, target: str, keep: int
) -> Path:
    """Write fp32 weights, both moments, the position and the shape, whole or not at all; then drop all but the last `keep`."""
    folder = checkpoint_path(run_folder, position.step)
    with atomic_folder(folder) as temporary:
        save_file(dict(drafter.state_dict()), temporary / "drafter.safetensors")
        save_file(_moments(drafter, optimizer), temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", {"format": FORMAT, "position": asdict(position), "shape": asdict(drafter.shape),
                                              "target": target})
        files = ("drafter.safetensors", "optimizer.safetensors", "state.json")
        write_json(temporary / "manifest.json", {name: sha256_file(temporary / name) for name in files})
    for old in list_checkpoints(run_folder)[:-keep]:
        shutil.rmtree(old)
    return folder


def _moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {}
    for name, parameter in drafter.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{key}/{name}"] = value.detach().clone()
    return state


def verify_checkpoint(folder: Path) -> None:
    """Raises UserError when a file of the checkpoint is missing, cut or changed."""
    manifest = read_json(folder / "manifest.json", what="the checkpoint's manifest")
    for name, expected in manifest.items():
        file = folder / name
        if not file.is_file() or sha256_file(file) != expected:
            raise UserError(f"{file}: the checkpoint is damaged (the file is missing, cut or changed): remove the folder {folder} "
                            "and resume from the checkpoint before it")


def load_shape(folder: Path) -> tuple[DrafterShape, str]:
    """The shape of a checkpoint's drafter and the target it was trained for."""
    state = read_json(folder / "state.json", what="the checkpoint's state")
    shape = state["shape"]
    return DrafterShape(**{**shape, "target_layer_ids": tuple(shape["target_layer_ids"]),
                           "layer_types": tuple(shape["layer_types"])}), state["target"]


def load_weights(folder: Path, drafter: Drafter) -> None:
    """Load a verified checkpoint's weights into a drafter of the same shape."""
    verify_checkpoint(folder)
    drafter.load_state_dict(load_file(folder / "drafter.safetensors"))


def resume_checkpoint(folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> Position:
    """Load weights and both moments in place and return the position, exactly as they were saved."""
    load_weights(folder, drafter)
    moments = load_file(folder / "optimizer.safetensors")
    for name, parameter in drafter.named_parameters():
        keys = {key.split("/", 1)[0] for key in moments if key.split("/", 1)[1] == name}
        optimizer.state[parameter] = {key: moments[f"{key}/{name}"].to(_home(key, parameter)) for key in keys}
    return Position(**read_json(folder / "state.json", what="the checkpoint's state")["position"])


def _home(key: str, parameter: Tensor) -> torch.device:
    return parameter.device if key != "step" or parameter.is_cuda else torch.device("cpu")
