"""Takes a checkpoint and its target, gives the folder that other engines load, checked, and how to serve it; trains nothing."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import UserError
from outrider.features.target import read_facts
from outrider.files import atomic_folder, write_json
from outrider.model.drafter import Drafter
from outrider.train.checkpoint import load_shape
from outrider.verify.decode import check_fit
from outrider.weights.opening import CHECKPOINT_STATE, find_drafter, open_drafter
from outrider.weights.published import CONFIG_NAME, WEIGHTS_NAME, to_config
from outrider.weights.selfcheck import selfcheck
from outrider.weights.serve import serve_commands


def export(checkpoint: Path, out: Path, target_path: str | None) -> dict[str, Any]:
    """Write a checkpoint's drafter (or a run's newest) to `out` in bf16 and check it; returns the JSON of `outrider export`.

    `target_path` None is the target it was trained for. Raises UserError on what does not fit, and RuntimeError when the
    self-check fails; `out` is then as it was.
    """
    source = find_drafter(checkpoint)
    if not (source / CHECKPOINT_STATE).is_file():
        raise UserError(f"{checkpoint}: is an exported drafter already: name a checkpoint or a run")
    check_out(out)
    drafter = open_drafter(source, dtype="float32", device="cpu")
    target = target_path or load_shape(source)[1]
    facts = read_facts(target)
    check_fit(drafter.shape, facts)
    config = to_config(drafter.shape, embedding_scale=embedding_scale(target), softcap=facts.softcap)
    with atomic_folder(out) as temporary:
        write_published(temporary, drafter, config)
        sound, reasons = selfcheck(temporary, drafter, facts)
        if not sound:
            raise RuntimeError(f"the export of {source} failed its self-check, {out} is as it was: {'; '.join(reasons)}")
    return {"folder": str(out), "selfcheck": sound, "serve": serve_commands(out, target, drafter.shape)}


def write_published(folder: Path, drafter: Drafter, config: dict[str, Any]) -> None:
    """The two files of the format, weights in bf16."""
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    write_json(folder / CONFIG_NAME, config)


def check_out(out: Path) -> None:
    """Raises UserError unless `out` is free, or holds an earlier export and nothing else: it is replaced as a whole."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file: name a folder to export to")
    foreign = sorted(p.name for p in out.iterdir() if p.name not in (CONFIG_NAME, WEIGHTS_NAME)) if out.exists() else []
    if foreign:
        raise UserError(f"{out}: holds other files ('{foreign[0]}'), which an export would replace: name a new folder")


def embedding_scale(target: str) -> float:
    """What the target's embedding module multiplies its table by: 1 for a plain embedding. Loads no weights. Raises UserError."""
    with torch.device("meta"):
        embedding = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target)).get_input_embeddings()
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", None)  # not ours: Gemma's scaled embedding in transformers
    if not isinstance(scale, float):
        raise UserError(f"target.path = {target!r}: its input embedding is a {type(embedding).__name__}, whose scaling "
                        "other engines cannot be told: this architecture cannot be exported")
    return scale
