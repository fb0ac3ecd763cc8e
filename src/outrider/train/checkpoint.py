"""Takes a copy of a run's state on the host, gives whole checkpoints on disk and back; knows nothing of when or how many.

A checkpoint is a folder:
    drafter/config.json, drafter/model.safetensors   the fp32 masters in the published layout: engines load this folder as it is
    optimizer.safetensors                            both moments and step counts, `exp_avg/layers.0...`
        or optimizer/*.safetensors                   the same where masters are shared out: each process wrote its own part
    rng.safetensors                                  random generators
    state.json                                       the position, and what the run was made from
    manifest.json                                    SHA-256 of all these files
Either is read by any number of processes.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import UserError
from outrider.files import atomic_folder, check_name, explain_os_errors, read_json, set_aside, sha256_file, write_json
from outrider.model.drafter import Drafter
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME
from outrider.progress import say
from outrider.train.masters import is_shared_out, mine, piece_of
from outrider.train.optim import coming_state, plain_state, rebuilt_state
from outrider.train.rng import restore_rng
from outrider.train.shards import names_in, read_shards
from outrider.train.tensor_file import write_tensors

FORMAT = 2
DRAFTER_FOLDER, OPTIMIZER_NAME, RNG_NAME, STATE_NAME = "drafter", "optimizer.safetensors", "rng.safetensors", "state.json"
SHARDS_FOLDER = "optimizer"
FILES = (f"{DRAFTER_FOLDER}/{CONFIG_NAME}", f"{DRAFTER_FOLDER}/{WEIGHTS_NAME}", OPTIMIZER_NAME, RNG_NAME, STATE_NAME)

NAME = re.compile(r"step-(\d{8,})")

Tensors = dict[str, Tensor]


class OtherVersionError(UserError):
    """A sound checkpoint that this version of outrider cannot read."""


class UnreadableError(UserError):
    """A checkpoint that the disk or the permissions do not let be read: what it is worth is not known."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` optimizer steps are done. Rows, anchors and rates follow from it.

    `tau`: real accepted length, last measured at `tau_step`; `best_tau` the best of them. `seconds`: training time so far, over
    all interruptions. `metrics_bytes`: length of metrics.jsonl. `bad_steps`: skipped because their gradient was not finite,
    `bad_in_row` of them the last ones. `bad_rows`: numbers of rows that could not be read and are left out since.
    `leak_tested`: the step of the last leak test.
    """

    step: int = 0
    tau: float | None = None
    tau_step: int | None = None
    best_tau: float | None = None
    seconds: float = 0.0
    metrics_bytes: int = 0
    bad_steps: int = 0
    bad_in_row: int = 0
    bad_rows: tuple[int, ...] = ()
    leak_tested: int | None = None


@dataclass(frozen=True)
class Origin:
    """What a run was made from, the same in all its checkpoints.

    `drafter_config`: config.json of its drafter. `target`: path or hub id. `inputs`: a digest of the content behind each path
    of the run file (`section.key`). `config`: the resolved run file. `versions`: of libraries. `git_commit`: of the repository
    that the run folder lies in.
    """

    drafter_config: dict[str, Any]
    target: str
    inputs: dict[str, str]
    config: dict[str, Any]
    versions: dict[str, str]
    git_commit: str | None


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds, on the host, every number finite: training may go on while it is written.

    Where masters are shared out, `optimizer` holds DTensors and `drafter` is empty in all processes but the first.
    """

    position: Position
    drafter: Tensors
    optimizer: Tensors
    rng: Tensors


def checkpoint_path(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """The run's checkpoints, oldest first. Interrupted writes and damaged ones have other names and are not among them.

    Raises UserError where their folder is a link to one that is not there, which must not be taken for a run without any.
    """
    folder = run_folder / "checkpoints"
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder}: leads to {folder.readlink()}, which is not there: is its disk mounted?")
    found = {int(name[1]): path for path in folder.glob("step-*") if (name := NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def coming(drafter: Drafter, optimizer: torch.optim.Optimizer) -> Tensors:
    """The large tensors of a snapshot, before there is one: shapes and dtypes, on the meta device. Names as in its parts."""
    found: Tensors = {}
    for name, parameter in drafter.named_parameters():
        found[name] = torch.empty(parameter.shape, device="meta")
        found |= {f"{key}/{name}": tensor for key, tensor in coming_state(parameter, optimizer).items()}
    return found


def coming_here(drafter: Drafter, optimizer: torch.optim.Optimizer, *, leads: bool) -> Tensors:
    """What of `coming` this process has to copy: the first one has all weights, and each its own moments."""
    found: Tensors = {}
    for name, parameter in drafter.named_parameters():
        if leads:
            found[name] = torch.empty(parameter.shape, device="meta")
        if leads or is_shared_out(drafter):
            found |= {f"{key}/{name}": tensor for key, tensor in coming_state(mine(parameter), optimizer).items()}
    return found


def moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state by name in plain tensors, `exp_avg/layers.0...`; not copied."""
    return {f"{key}/{name}": value for name, parameter in drafter.named_parameters()
            for key, value in plain_state(optimizer.state[parameter]).items()}


def write_checkpoint(run_folder: Path, snapshot: Snapshot, origin: Origin, shards: Path | None = None) -> Path:
    """Write a checkpoint, whole or not at all. Raises UserError when the disk refuses.

    `shards`: a folder with the optimizer's state, which becomes a part of it; without, it is written from the snapshot.
    """
    folder = checkpoint_path(run_folder, snapshot.position.step)
    facts = {key: value for key, value in asdict(origin).items() if key != "drafter_config"}
    parts = {FILES[1]: (snapshot.drafter, {"format": "pt"}), RNG_NAME: (snapshot.rng, None)}
    if shards is None:
        parts[OPTIMIZER_NAME] = (snapshot.optimizer, None)
    with atomic_folder(folder) as temporary:
        (temporary / DRAFTER_FOLDER).mkdir()
        write_json(temporary / DRAFTER_FOLDER / CONFIG_NAME, origin.drafter_config)
        write_json(temporary / STATE_NAME, {"format": FORMAT, "position": asdict(snapshot.position), **facts})
        sums = {name: write_tensors(tensors, temporary / name, metadata) for name, (tensors, metadata) in parts.items()}
        if shards is not None:
            shards.rename(temporary / SHARDS_FOLDER)
        sums |= {name: sha256_file(temporary / name) for name in _files(temporary) if name not in sums}
        write_json(temporary / "manifest.json", sums)
    return folder


def _files(folder: Path) -> list[str]:
    """What a checkpoint consists of, the manifest apart, by what lies there of the optimizer's two forms."""
    shards = sorted(f"{SHARDS_FOLDER}/{file.name}" for file in (folder / SHARDS_FOLDER).glob("*"))
    return [name for name in FILES if name != OPTIMIZER_NAME or not shards] + shards


def verify_checkpoint(folder: Path) -> None:
    """Raises UserError when a file of the checkpoint is missing, cut or changed, OtherVersionError, UnreadableError."""
    try:
        _verify(folder)
    except (OSError, UserError) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
            raise
        raise UnreadableError(f"{folder}: the checkpoint cannot be read ({cause.strerror}), which is no verdict on it: see to "
                              "the disk and the permissions; to go on from the one before it, rename its folder") from error


def _verify(folder: Path) -> None:
    manifest = read_json(folder / "manifest.json", what="the checkpoint's manifest")
    state = folder / STATE_NAME
    if not isinstance(manifest, dict) or not state.is_file() or sha256_file(state) != manifest.get(STATE_NAME):
        raise _damaged(state)  # before what it says of its version is believed
    read_state(folder)
    names = _files(folder)
    names += sorted(manifest.keys() - set(names))
    for name in names:
        file = folder / name
        check_name(name, where=str(folder / "manifest.json"))
        if not file.is_file() or sha256_file(file) != manifest.get(name):
            raise _damaged(file)


def _damaged(file: Path) -> UserError:
    return UserError(f"{file}: the checkpoint is damaged (the file is missing, cut or changed): use the one before it")


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint. Raises UserError when it is missing or broken, OtherVersionError."""
    path = folder / STATE_NAME
    state = read_json(path, what="the checkpoint's state")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise OtherVersionError(f"{path}: was not written by this version of outrider: use the version that wrote it, or start a "
                                "new run with --set train.folder=...")
    return state


def read_position(folder: Path) -> Position:
    """Where the run stood at a checkpoint. Raises UserError."""
    try:
        saved = read_state(folder)["position"]
        return Position(**{**saved, "bad_rows": tuple(saved["bad_rows"])})
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / STATE_NAME}: holds no position of a run ({error}): use another checkpoint") from error


def newest_sound(run_folder: Path) -> Path | None:
    """The newest checkpoint whose files are all as written, or None where there are none at all.

    A damaged one is set aside (`files.set_aside`), which is said, and the one before it is tried. Raises UserError when none is
    sound, OtherVersionError when the newest is of another version, UnreadableError.
    """
    found = list_checkpoints(run_folder)
    for folder in reversed(found):
        try:
            verify_checkpoint(folder)
        except (OtherVersionError, UnreadableError):
            raise
        except UserError as error:
            with explain_os_errors(folder):
                say(f"{error}; renamed to {set_aside(folder).name}")
            continue
        return folder
    if lost := len(list((run_folder / "checkpoints").glob("step-*.damaged*"))):  # by an earlier start too
        raise UserError(f"{run_folder / 'checkpoints'}: none of the {lost} checkpoints is whole: bring one back from a copy, or "
                        "start a new run with --set train.folder=...")
    return None


@torch.no_grad()
def load_checkpoint(folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> Position:
    """Load weights, moments and random generators in place and return the position, exactly as they were saved.

    The folder has been verified. Masters may be whole or shared out, then and now: each process takes what is its own.
    """
    weights = load_file(folder / DRAFTER_FOLDER / WEIGHTS_NAME)
    named = dict(drafter.named_parameters())
    assert weights.keys() == named.keys(), "the checkpoint is verified and of this run, so its names are"
    plain = (_from_shards if (folder / SHARDS_FOLDER).is_dir() else _from_one_file)(folder, named)
    for name, parameter in named.items():
        parameter.copy_(piece_of(weights[name], parameter))
        state = {key.split("/", 1)[0]: value for key, value in plain.items() if key.split("/", 1)[1] == name}
        optimizer.state[parameter] = rebuilt_state(state, optimizer)
    restore_rng(load_file(folder / RNG_NAME))
    return read_position(folder)


def _from_one_file(folder: Path, named: Mapping[str, Tensor]) -> Tensors:
    """The optimizer's state by name, where its parameters are."""
    state: Tensors = {}
    for key, value in load_file(folder / OPTIMIZER_NAME).items():
        kind, name = key.split("/", 1)
        state[key] = value.to(named[name].device) if kind == "step" else piece_of(value, named[name])
    return state


def _from_shards(folder: Path, named: Mapping[str, Tensor]) -> Tensors:
    """As `_from_one_file`."""
    state: Tensors = {}
    for key in names_in(folder / SHARDS_FOLDER):
        kind, name = key.split("/", 1)
        state[key] = torch.zeros((), device=named[name].device) if kind == "step" else torch.empty_like(named[name])
    read_shards(folder / SHARDS_FOLDER, state)
    return state
