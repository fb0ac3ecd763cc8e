"""Takes a checkpoint and its target, gives the folder that other engines load, checked, and how to serve it; trains nothing."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import AutoConfig

from outrider.errors import UserError
from outrider.features.facts import read_facts
from outrider.features.target import DTYPES, load_target, load_tokenizer
from outrider.features.trust import code_of, is_trusted
from outrider.files import atomic_folder, write_json
from outrider.model.drafter import Drafter
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME, to_config
from outrider.train.checkpoint import STATE_NAME, read_state
from outrider.verify.decode import check_fit
from outrider.weights.card import CARD_NAME, model_card, read_source
from outrider.weights.gguf import GGUF_NAME, check_gguf, write_gguf
from outrider.weights.golden import GOLDEN_NAME, golden_draft, write_golden
from outrider.weights.opening import (
    find_drafter,
    is_drafter,
    open_drafter,
    scale_of_embedding,
    warn_of_other_target,
    weights_digest,
)
from outrider.weights.selfcheck import check_gguf_file, rounded, selfcheck
from outrider.weights.serve import serve_commands
from outrider.weights.speculators import to_speculators

FORMATS = ("hf", "gguf", "speculators")
FILES = (CONFIG_NAME, WEIGHTS_NAME, GGUF_NAME, GOLDEN_NAME, CARD_NAME)
GOLDEN_TEXT = "The golden vector of a drafter is one draft, computed stage by stage: "


def export(
    checkpoint: Path, out: Path, target_path: str | None, *, formats: Collection[str], dtype: str, golden: bool
) -> dict[str, Any]:
    """Write a checkpoint's drafter (or a run's newest) to `out` in `dtype` and check it; returns the JSON of `outrider export`.

    `formats`: of FORMATS. `target_path` None is the target it was trained for. `golden` loads the target and adds the golden
    vector. Raises UserError on what does not fit, and RuntimeError when the self-check fails; `out` is then as it was.
    """
    check_formats(formats)
    source = find_drafter(checkpoint)
    if not (source / STATE_NAME).is_file():
        what = "is an exported drafter already" if is_drafter(source) else "is a model's folder, not a drafter's"
        raise UserError(f"{checkpoint}: {what}: name a run (its train.folder) or a checkpoint in it")
    check_out(out)
    drafter = rounded(open_drafter(source, dtype="float32", device="cpu"), dtype)
    target = target_path or read_state(source)["target"]
    facts = read_facts(target)
    check_fit(drafter.shape, facts)
    if target_path is not None:
        warn_of_other_target(source, target)
    if "gguf" in formats:
        check_gguf(drafter.shape, load_tokenizer(target))
    serve = serve_commands(out, target, drafter.shape, formats)
    card_source, weights = read_source(source), {weights_digest(source)}
    with atomic_folder(out) as temporary:
        reasons = _write_gguf(temporary, drafter, target, dtype) if "gguf" in formats else []
        if set(formats) & {"hf", "speculators"}:
            write_published(temporary, drafter, _config(formats, drafter, target, dtype))
            reasons += selfcheck(temporary, drafter, facts, dtype=dtype)
        if reasons:
            raise RuntimeError(f"the export of {source} failed its self-check, {out} is as it was: {'; '.join(reasons)}")
        if golden:
            whole = load_target(target, dtype="float32", device="cpu", last_layer=None, head=True)
            ids = load_tokenizer(target)(GOLDEN_TEXT)["input_ids"]
            write_golden(temporary / GOLDEN_NAME, golden_draft(whole, drafter, ids))
        card = model_card(drafter.shape, target=target, source=card_source, weights=weights | {weights_digest(temporary)},
                          serve=serve, golden=golden, code=is_trusted(target))
        (temporary / CARD_NAME).write_text(card, encoding="utf-8")
    return {"folder": str(out), "selfcheck": True, "formats": sorted(formats), "serve": serve}


def _write_gguf(folder: Path, drafter: Drafter, target: str, dtype: str) -> list[str]:
    """Write the file for llama.cpp; gives every reason why, read back, it is not `drafter`."""
    path, tokenizer = folder / GGUF_NAME, load_tokenizer(target)
    write_gguf(path, drafter, tokenizer, name=f"DFlash drafter for {Path(target).name}", dtype=DTYPES[dtype])
    return check_gguf_file(path, drafter, tokenizer)


def check_formats(formats: Collection[str]) -> None:
    """Raises UserError for an unknown format, none, or two that need a config.json each."""
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown or not formats:
        raise UserError(f"--format {','.join(formats)}: must be of {', '.join(FORMATS)}, separated by commas; "
                        "vLLM, SGLang and DFlash's own package read hf, llama.cpp reads gguf")
    if {"hf", "speculators"} <= set(formats):
        raise UserError("--format hf,speculators: both write a config.json: export them to two folders")


def _config(formats: Collection[str], drafter: Drafter, target: str, dtype: str) -> dict[str, Any]:
    scale, softcap = scale_of_embedding(target), read_facts(target).softcap
    if "hf" in formats:
        return to_config(drafter.shape, embedding_scale=scale, softcap=softcap, dtype=dtype)
    if scale != 1 or softcap is not None:
        raise UserError(f"target.path = {target!r}: scales its embedding or caps its logits, which the speculators format cannot "
                        "say: use --format hf")
    architectures = AutoConfig.from_pretrained(target, **code_of(target)).architectures or []
    return to_speculators(drafter.shape, target=target, architectures=architectures, dtype=dtype)


def write_published(folder: Path, drafter: Drafter, config: dict[str, Any]) -> None:
    """The two files that transformers-like loaders read, weights in the config's dtype."""
    dtype = DTYPES[config["dtype"]]
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    write_json(folder / CONFIG_NAME, config)


def check_out(out: Path) -> None:
    """Raises UserError unless `out` is free, or holds an earlier export and nothing else: it is replaced as a whole."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file: name a folder to export to")
    foreign = sorted(p.name for p in out.iterdir() if p.name not in FILES) if out.exists() else []
    if foreign:
        raise UserError(f"{out}: holds other files ('{foreign[0]}'), which an export would replace: name a new folder")
