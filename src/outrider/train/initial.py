"""Takes the drafter that a fresh run begins from and the resolved run, gives its weights or a refusal; opens no folder."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from outrider.errors import UserError
from outrider.model.drafter import Drafter
from outrider.records import DrafterShape
from outrider.train.resolve import Resolved

# Tables and borrowed tensors: no weight of the drafter depends on them, and published configs fill them in at will.
FREE = {"max_position_embeddings", "tie_word_embeddings"}
OF_TARGET = {"hidden_size": "hidden size", "vocab_size": "vocabulary", "num_target_layers": "number of layers",
             "rms_norm_eps": "norm epsilon"}


@dataclass(frozen=True)
class Initial:
    """A trained drafter in float32; `target_digest` (features.target) is of the target it was trained on, where that is known."""

    drafter: Drafter
    target_digest: str | None


OpenInitial = Callable[[], Initial]


def check_initial(initial: Initial, resolved: Resolved, target_digest: str) -> None:
    """Raises UserError naming everything in which the drafter of `train.init_from` is not the one that this run trains."""
    where = f"train.init_from = '{resolved.config.train.init_from}'"
    theirs, ours = initial.drafter.shape, resolved.shape
    differing = [field.name for field in fields(DrafterShape)
                 if field.name not in FREE and getattr(theirs, field.name) != getattr(ours, field.name)]
    for name in differing:
        if name in OF_TARGET:
            raise UserError(f"{where}: was made for a target whose {OF_TARGET[name]} is {getattr(theirs, name)}, this target's "
                            f"is {getattr(ours, name)}: use the target that it was trained for")
    if differing:
        told = "; ".join(f"drafter.{name} is {_toml(getattr(theirs, name))} there, {_toml(getattr(ours, name))} here"
                         for name in differing)
        raise UserError(f"{where}: {told}: set them in the run file as they are there")
    if initial.target_digest not in (None, target_digest):
        raise UserError(f"{where}: was trained on another target than target.path = '{resolved.config.target.path}' (same sizes, "
                        "other config or weights): use the target that it was trained for")


def _toml(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
