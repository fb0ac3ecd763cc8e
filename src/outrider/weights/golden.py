"""Takes a target and a drafter, gives one draft with every intermediate value, for engines to check themselves; reads no text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import UserError
from outrider.features.capture import captured_layers
from outrider.features.target import Target
from outrider.model.drafter import ContextCache, Drafter

GOLDEN_NAME = "golden.safetensors"
STAGES = ("prompt_ids", "features", "context", "anchor", "hidden", "drafts")
EXACT = ("prompt_ids", "anchor", "drafts")


@torch.no_grad()
def golden_draft(target: Target, drafter: Drafter, prompt_ids: Sequence[int]) -> dict[str, Tensor]:
    """The first block after a prompt of P tokens, drafted greedily in the dtypes given, every stage in float32 or int64.

    `prompt_ids` `[P]`; `features` `[P, F]`, the target's outputs at each captured layer, in order, side by side; `context`
    `[P, D]`; `anchor` `[1]`, the target's own next token; `hidden` `[K, D]` after the drafter's last norm; `drafts` `[K - 1]`.
    """
    ids_1P = torch.tensor([list(prompt_ids)], device=target.device)
    with captured_layers(target, drafter.shape.target_layer_ids, stop_after_last=False) as outputs:
        logits = target.model(ids_1P, use_cache=False, logits_to_keep=1).logits
    features_1PF = torch.cat(outputs, dim=-1).to(drafter.norm.weight)
    anchor = logits[0, -1].argmax()
    block_1K = torch.full((1, drafter.shape.block_size), drafter.shape.mask_token_id, device=target.device)
    block_1K[0, 0] = anchor
    hidden_1KD = drafter.draft(target.embed(block_1K).to(drafter.norm.weight), features_1PF, ContextCache())
    drafts = target.head.logits(hidden_1KD[0, 1:].to(target.device)).argmax(-1)
    stages = {"prompt_ids": ids_1P[0], "features": features_1PF[0], "context": drafter.context(features_1PF)[0],
              "anchor": anchor[None], "hidden": hidden_1KD[0], "drafts": drafts}
    return {name: (value if name in EXACT else value.float()).cpu().contiguous() for name, value in stages.items()}


def write_golden(path: Path, stages: Mapping[str, Tensor]) -> None:
    """Write what `golden_draft` gave."""
    save_file(dict(stages), path, metadata={"format": "pt"})


def check_golden(path: Path, found: Mapping[str, Tensor], *, tolerance: float) -> list[str]:
    """What an engine computed against the file, stage by stage in order: one sentence for each that differs.

    `found` has any of the stages. Ids must be equal, values within `tolerance` (relative norm; 1e-4 suits float32). The first
    sentence says where to look: later stages follow from earlier ones. Raises UserError when the file cannot be read.
    """
    try:
        golden = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: the golden vector cannot be read ({error}): export the drafter again with --golden") from error
    unknown = sorted(found.keys() - set(STAGES))
    if unknown:
        raise UserError(f"'{unknown[0]}' is not a stage of the golden vector: they are {', '.join(STAGES)}")
    reasons = []
    for name in STAGES:
        if name not in found:
            continue
        expected, given = golden[name], found[name].cpu()
        if expected.shape != given.shape:
            reasons.append(f"{name}: has shape {list(given.shape)}, must be {list(expected.shape)}")
        elif name in EXACT:
            wrong = (expected != given).nonzero().flatten().tolist()
            if wrong:
                reasons.append(f"{name}: entry {wrong[0]} is {int(given[wrong[0]])}, must be {int(expected[wrong[0]])}")
        else:
            difference = float((expected - given.float()).norm() / expected.norm())
            if not difference <= tolerance:
                reasons.append(f"{name}: differs by {difference:.2e} (relative norm), at most {tolerance:.0e} is rounding")
    return reasons
