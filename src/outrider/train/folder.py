"""Takes a run and the folder that it is to live in, refuses one that is unfit or holds another run; loads and writes nothing."""

import json
import shutil
import subprocess
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.config import CheckpointConfig, RunConfig
from outrider.errors import UserError
from outrider.files import explain_os_errors
from outrider.progress import say
from outrider.train.checkpoint import read_state
from outrider.train.metrics import METRICS_NAME

RESOLVED_NAME = "resolved.toml"
BY_CONTENT = {"target.path", "data.rows"}  # told apart by what lies there, see `check_inputs`: a run may be moved
FREE_TO_CHANGE = {"target.trust_remote_code", "train.folder", "train.log_every", "train.tracker", "train.max_hours",
                  "train.accept_every", "train.accept_prompts", "train.accept_tokens", "train.trace_steps",
                  "features.kernel_cache", "features.require_fast_kernels", "features.server", "features.server_folder",
                  "features.server_requests", "features.server_check"}
FREE_SECTIONS = {"checkpoint", "guards", "placement"}


def check_place(config: RunConfig) -> None:
    """Refuse a `train.folder` in which a run could not be kept, before anything is loaded: one that is no folder, leads nowhere,
    cannot be written, or belongs to what the run is made from, which may be made anew with all that lies in it. Raises UserError.
    """
    folder = config.train.folder
    here = f"train.folder = '{folder}'"
    try:
        real = folder.resolve()
        there = next(path for path in (real, *real.parents) if path.exists())
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links; a name too long, or not a name
        raise UserError(f"{here}: is no path ({getattr(error, 'strerror', None) or error}): choose another folder") from error
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{here}: leads to {real}, which is not there: is its disk mounted? Make that folder, or choose another")
    if not there.is_dir():
        raise UserError(f"{here}: {there} is a file, not a folder: choose another folder")
    for name, path in {"target.path": Path(config.target.path), "data.rows": config.data.rows}.items():
        if path.is_dir() and real.is_relative_to(path.resolve()):
            raise UserError(f"{here}: lies in {name} = '{path}', which may be made anew, and the run would go with it: choose a "
                            "folder of its own")
    for name, other in {"features.store": config.features.store, "train.init_from": config.train.init_from}.items():
        if other is not None and other.resolve() == real:
            raise UserError(f"{here}: is {name} too: choose a folder of its own")
    if real.is_dir():
        with explain_os_errors(folder), tempfile.NamedTemporaryFile(prefix=".", suffix=".partial", dir=real):
            pass


def check_folder(config: RunConfig, checkpoint: Path | None) -> None:
    """Refuse a folder that holds something else, a run whose checkpoints have gone, or one of which a field that matters has
    changed since. `config` is resolved. Raises UserError."""
    folder = config.train.folder
    if checkpoint is None:
        _check_without_checkpoint(folder)
        return
    state = read_state(checkpoint)
    changed = changes(state["config"], config.model_dump(mode="json"))
    if changed:
        raise UserError(f"train.folder = '{folder}': holds a run of another run file ({', '.join(changed)}): undo the change "
                        "to go on with it, or start a new one with --set train.folder=...")
    for name, now in versions().items():
        if state["versions"].get(name) != now:
            say(f"{name} is {now}, {state['versions'].get(name)} wrote {checkpoint.name}: numbers may differ in their last bits")


def _check_without_checkpoint(folder: Path) -> None:
    metrics, resolved = folder / METRICS_NAME, folder / RESOLVED_NAME
    if not metrics.exists():
        return
    if not resolved.exists():
        raise UserError(f"train.folder = '{folder}': holds a {METRICS_NAME} that no run wrote: choose another folder")
    every, last = _every(resolved), _last_step(metrics)
    if last > 2 * every:  # the second one is not begun before the first is written
        raise UserError(f"train.folder = '{folder}': its run came to step {last} with a checkpoint every {every}, but none is "
                        f"in {folder / 'checkpoints'}: bring them back, or start a new run with --set train.folder=...")


def _every(resolved: Path) -> int:
    try:
        return int(tomllib.loads(resolved.read_text(encoding="utf-8"))["checkpoint"]["every"])
    except (ValueError, KeyError, TypeError):
        return CheckpointConfig().every


def _last_step(metrics: Path) -> int:
    """Of the newest line that can be read; 0 where there is none."""
    for text in reversed(metrics.read_bytes().splitlines()):
        try:
            return int(json.loads(text)["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return 0


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The fields that differ and matter, `section.key (old -> new)`. What `before` does not know, because an older version wrote
    it, had the default."""
    found = []
    for section, values in now.items():
        kind = RunConfig.model_fields[section].annotation
        assert kind is not None
        for key, new in values.items():
            old = before.get(section, {}).get(key, kind.model_fields[key].default)
            if old != new and section not in FREE_SECTIONS and f"{section}.{key}" not in FREE_TO_CHANGE | BY_CONTENT:
                found.append(f"{section}.{key} ({old} -> {new})")
    return found


def check_inputs(checkpoint: Path | None, inputs: dict[str, str]) -> None:
    """Refuse to go on with other content behind the run file's paths, wherever they lead now."""
    before = inputs if checkpoint is None else read_state(checkpoint)["inputs"]
    for name in sorted(before.keys() | inputs.keys()):
        if before.get(name) != inputs.get(name):
            raise UserError(f"{name}: what it names has changed since {checkpoint} was written: bring it back, or start a new "
                            "run with --set train.folder=...")


def versions() -> dict[str, str]:
    return {"outrider": __version__, **{name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")}}


def git_commit(folder: Path) -> str | None:
    """The commit checked out where `folder` lies; None outside a repository, or where there is no git."""
    git = shutil.which("git")
    if git is None:
        return None
    asked = subprocess.run([git, "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None
