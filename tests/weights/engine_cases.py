"""A toy target and half-trained drafters for it, of sizes that every engine's CPU kernels take; float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamacpp import target_folder
from overfit import overfit_drafter
from toys import toy_shape

from outrider.features.target import Target, load_target
from outrider.model.drafter import Drafter
from outrider.records import SLIDING
from outrider.verify.decode import target_alone
from outrider.verify.sampling import DecodeOptions

PROMPTS = ([72, 101, 108, 108, 111, 32, 104], [9, 9, 9])  # the drafters are trained on the text after the first
LIMIT, BLOCK = 24, 4
HEAD = 32  # the smallest head that vLLM's CPU kernels take
SHAPES = {
    "full": toy_shape(head_dim=HEAD),
    "sliding": toy_shape(head_dim=HEAD, layer_types=(SLIDING, SLIDING), sliding_window=6, rope_theta=5e5),
}
HALF = "half-trained"
STEPS = {  # of training on one text; half-trained so that drafts change with the causality inside the block
    "random": {"full": 0, "sliding": 0}, HALF: {"full": 20, "sliding": 11}, "overfit": {"full": 120, "sliding": 120}}


@dataclass(frozen=True)
class Pairing:
    """A target as a folder, with its GGUF file in it, and loaded."""

    folder: Path
    target: Target

    def drafter(self, name: str, prompt: Sequence[int] = PROMPTS[0], quality: str = HALF) -> Drafter:
        """Trained on the text after `prompt`."""
        text = target_alone(self.target, prompt, greedy(LIMIT)).tokens
        return overfit_drafter(self.target, SHAPES[name], (*prompt, *text), prompt=len(prompt), steps=STEPS[quality][name])


def make_pairing(folder: Path, kind: str) -> Pairing:
    target_folder(folder, kind, head_dim=HEAD)
    return Pairing(folder, load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True))


def greedy(limit: int) -> DecodeOptions:
    """Without stop tokens: each engine ends a text in its own way, its limit is the same for all."""
    return DecodeOptions.greedy(max_new_tokens=limit, stop_ids=())
