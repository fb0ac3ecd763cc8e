"""Takes a path (run, checkpoint or exported folder), gives the drafter in it; writes nothing."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import UserError
from outrider.features.target import DTYPES, embedding_scale, target_digest
from outrider.features.trust import code_of
from outrider.files import read_json, sha256_file
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.model.published import ARCHITECTURE, CONFIG_NAME, WEIGHTS_NAME, from_config, tensor_shapes
from outrider.progress import say
from outrider.records import DrafterShape
from outrider.train.checkpoint import DRAFTER_FOLDER, STATE_NAME, list_checkpoints, read_state, verify_checkpoint
from outrider.weights.speculators import is_speculators, to_published

READABLE = (torch.float32, torch.bfloat16, torch.float16)


def open_drafter(path: Path, *, dtype: str, device: str) -> Drafter:
    """The drafter of an exported folder, a checkpoint, or a run's newest checkpoint, in `dtype` ("float32" or "bfloat16").

    Raises UserError when there is none or it is damaged.
    """
    folder = find_drafter(path)
    if (folder / STATE_NAME).is_file():
        verify_checkpoint(folder)
        folder = folder / DRAFTER_FOLDER
    config_path = folder / CONFIG_NAME
    config = read_json(config_path, what="the drafter's config")
    if isinstance(config, dict) and not _is_drafters(config):
        raise UserError(f"{path}: is a model's folder, not a drafter's: name an exported drafter, a checkpoint or a run")
    if is_speculators(config):
        config = to_published(config, where=str(config_path))
    shape = from_config(config, where=str(config_path))
    drafter = Drafter(shape, dense_attention)
    drafter.load_state_dict(read_tensors(folder / WEIGHTS_NAME, shape))
    return drafter.to(torch.device(device), DTYPES[dtype]).eval().requires_grad_(False)


def read_target_digest(path: Path) -> str | None:
    """`features.target.target_digest` of the target that the drafter at `path` was trained on; None where nothing there says it.

    A checkpoint holds it, the speculators format names the target's folder, the published format says only its sizes.
    """
    folder = find_drafter(path)
    if (folder / STATE_NAME).is_file():
        return str(read_state(folder)["inputs"]["target.path"])
    config = read_json(folder / CONFIG_NAME, what="the drafter's config")
    verifier = config["speculators_config"]["verifier"]["name_or_path"] if is_speculators(config) else None
    return target_digest(verifier) if verifier is not None and Path(verifier).expanduser().is_dir() else None


def weights_digest(path: Path) -> str | None:
    """Hex SHA-256 of the file of weights that `open_drafter` reads at `path`; None where there is none."""
    with contextlib.suppress(UserError):
        folder = find_drafter(path)
        weights = (folder / DRAFTER_FOLDER if (folder / STATE_NAME).is_file() else folder) / WEIGHTS_NAME
        return sha256_file(weights) if weights.is_file() else None
    return None


def check_scale(path: Path, target: str) -> None:
    """Raises UserError when the drafter at `path` says that its target's embedding is scaled otherwise than `target`'s is.

    Where it says nothing (z-lab's earlier folders, speculators), the target's own embedding is taken as it is.
    """
    folder = find_drafter(path)
    config_path = (folder / DRAFTER_FOLDER if (folder / STATE_NAME).is_file() else folder) / CONFIG_NAME
    said = read_json(config_path, what="the drafter's config").get("dflash_config", {}).get("input_embedding_scale")
    if said is not None and said != (scale := scale_of_embedding(target)):
        raise UserError(f"{config_path}: dflash_config.input_embedding_scale = {said!r}: the target {target} scales its "
                        f"embedding by {scale:g}: use the target that the drafter was trained for")


def scale_of_embedding(target: str) -> float:
    """`embedding_scale` of a target by its config alone: no weights are loaded. Raises UserError."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(target, **code_of(target))
        embedding = AutoModelForCausalLM.from_config(config, **code_of(target)).get_input_embeddings()
    return embedding_scale(embedding, where=target)


def is_drafter(folder: Path) -> bool:
    """Whether a folder's config describes a drafter, of any of the formats, right or wrong, or some other model."""
    config = read_json(folder / CONFIG_NAME, what="the drafter's config")
    return isinstance(config, dict) and _is_drafters(config)


def _is_drafters(config: dict[str, Any]) -> bool:
    return "dflash_config" in config or is_speculators(config) or config.get("architectures") in (None, [ARCHITECTURE])


def warn_of_other_target(path: Path, target: str) -> None:
    """Say so where the drafter at `path` is known to have been trained for another target: it fits in size and guesses badly."""
    trained_for = read_target_digest(path)
    if trained_for is not None and trained_for != target_digest(target):
        say(f"WARNING: {path} was trained for another target than {target} is now (config, weights, or hub id and folder): the "
            "text stays the target's own, but fewer guesses are accepted")


def find_drafter(path: Path) -> Path:
    """`path` itself when it is a checkpoint or an export, the newest checkpoint when it is a run. Raises UserError."""
    if (path / STATE_NAME).is_file() or (path / CONFIG_NAME).is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder: name an exported drafter, a checkpoint or a run")
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise UserError(f"{path}: holds no drafter: name an exported folder ({CONFIG_NAME} and {WEIGHTS_NAME}), a checkpoint "
                        f"({STATE_NAME}) or a run (checkpoints/)")
    return checkpoints[-1]


def read_tensors(path: Path, shape: DrafterShape) -> dict[str, Tensor]:
    """The drafter's tensors from a safetensors file, exactly the allow-list, all finite. Raises UserError naming the fault."""
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: the drafter's weights are missing: check the path, or export again") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: the drafter's weights cannot be read ({error}): copy the file or export again") from error
    expected = tensor_shapes(shape)
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    for problem, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            raise UserError(f"{path}: {problem} tensor '{names[0]}'{_and_more(names)}: a drafter of this config has exactly "
                            f"{len(expected)} tensors, and no embedding or head of its own")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise UserError(f"{path}: tensor '{name}' has shape {list(tensor.shape)}, the config asks for {list(expected[name])}")
        if tensor.dtype not in READABLE:
            raise UserError(f"{path}: tensor '{name}' is {str(tensor.dtype).removeprefix('torch.')}: drafters here hold float32, "
                            "bfloat16 or float16, so a quantised one must be dequantised first")
        if not tensor.isfinite().all():
            raise UserError(f"{path}: tensor '{name}' holds values that are not finite: the drafter is damaged, use an "
                            "earlier checkpoint")
    return tensors


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
