"""Takes a target, a drafter and a prompt in tokens, gives the text drafted and verified; knows nothing of files or training."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.errors import UserError
from outrider.features.target import Target, TargetFacts
from outrider.model.drafter import ContextCache, Drafter
from outrider.records import DrafterShape
from outrider.verify.rollback import TargetReader
from outrider.verify.sampling import Chooser, DecodeOptions


@dataclass(frozen=True)
class Cycle:
    """What one target forward gave: draft tokens accepted and kept, then `bonus`, the target's own token.

    `bonus` is None where the text ended (stop token or limit) on a draft token. `drafted` counts the draft tokens verified: 0 in
    the forward of the prompt.
    """

    accepted: tuple[int, ...]
    bonus: int | None
    drafted: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.accepted if self.bonus is None else (*self.accepted, self.bonus)


@dataclass(frozen=True)
class Decoded:
    """A continuation: new tokens (the stop token included, nothing after it), one cycle a target forward, wall seconds.

    The first cycle is the prompt's own forward; accepted lengths count the later ones, and only tokens that were kept.
    """

    tokens: list[int]
    cycles: tuple[Cycle, ...]
    seconds: float

    @property
    def runs(self) -> list[int]:
        """Accepted draft tokens of each forward after the prompt's own."""
        return [len(cycle.accepted) for cycle in self.cycles[1:]]

    @property
    def acceptance_lengths(self) -> list[int]:
        """Tokens given by each forward after the prompt's own, bonus included."""
        return [len(cycle.tokens) for cycle in self.cycles[1:]]


def check_fit(shape: DrafterShape, facts: TargetFacts) -> None:
    """Raises UserError when the drafter was made for another target."""
    for what, drafters, targets in (
        ("hidden size", shape.hidden_size, facts.hidden_size),
        ("vocabulary", shape.vocab_size, facts.vocab_size),
        ("number of layers", shape.num_target_layers, facts.num_layers),
    ):
        if drafters != targets:
            raise UserError(f"drafter: was made for a target whose {what} is {drafters}, this target's is {targets}: use the "
                            "target that it was trained for")


def check_prompt(prompt_ids: Sequence[int], options: DecodeOptions, facts: TargetFacts, *, name: str) -> None:
    """Raises UserError for a prompt that cannot be continued; `name` begins the message."""
    if not prompt_ids:
        raise UserError(f"{name}: is empty: give at least one token")
    outside = [token for token in prompt_ids if not 0 <= token < facts.vocab_size]
    if outside:
        raise UserError(f"{name}: token {outside[0]} is outside the target's vocabulary of {facts.vocab_size}: use the "
                        "target's tokenizer")
    room = facts.max_position_embeddings - options.max_new_tokens
    if len(prompt_ids) > room:
        raise UserError(f"{name}: has {len(prompt_ids)} tokens, but the target's {facts.max_position_embeddings} positions leave "
                        f"room for {room} beside {options.max_new_tokens} new ones: shorten it or lower max_new_tokens")


def draft_block(
    target: Target, drafter: Drafter, anchor: int, new_features: torch.Tensor, cache: ContextCache, *, slots: int
) -> torch.Tensor:
    """The drafter's logits `[slots - 1, V]` for the tokens after `anchor`; the new context enters `cache`.

    `slots` is K, or less at the end of a text. Inputs are cast to the drafter's own dtype.
    """
    weight = drafter.norm.weight
    ids_1K = torch.full((1, slots), drafter.shape.mask_token_id, device=target.device)
    ids_1K[0, 0] = anchor
    noise_1KD = target.embed(ids_1K).to(weight.device, weight.dtype)
    hidden_1KD = drafter.draft(noise_1KD, new_features.to(weight.device, weight.dtype), cache)
    return target.head.logits(hidden_1KD[0, 1:].to(target.device))


def end_text(tokens: Sequence[int], *, room: int, stop_ids: Sequence[int]) -> int:
    """How many of `tokens` stay: at most `room`, up to and including the first stop token."""
    kept = tokens[:room]
    return next((i + 1 for i, token in enumerate(kept) if token in stop_ids), len(kept))


@torch.no_grad()
def speculate_cycles(target: Target, drafter: Drafter, prompt_ids: Sequence[int], options: DecodeOptions) -> Iterator[Cycle]:
    """Draft and verify (01-dflash), yielding as the text grows: first the prompt's own token, then a cycle a target forward.

    With P prompt tokens the first new token stands at position P and is the first anchor; context is what stands before the
    anchor. No block reaches beyond `max_new_tokens`. Raises UserError when drafter, target and prompt do not fit.
    """
    check_fit(drafter.shape, target.facts)
    check_prompt(prompt_ids, options, target.facts, name="prompt")
    chooser = Chooser(options, target.device)
    reader = TargetReader(target, drafter.shape.target_layer_ids)
    context = ContextCache()
    logits, features = reader.read(prompt_ids, last_only=True)
    reader.keep(len(prompt_ids))
    anchor = chooser.next_token(logits[-1])
    yield Cycle((), anchor, 0)
    room = options.max_new_tokens - 1
    while room and anchor not in options.stop_ids:
        assert features is not None
        slots = min(drafter.shape.block_size, room + 1)
        proposal = chooser.propose(draft_block(target, drafter, anchor, features, context, slots=slots))
        assert context.length == reader.length  # the anchor's own state is not context: it does not exist yet
        logits, features = reader.read([anchor, *proposal.tokens], last_only=False)
        assert features is not None
        accepted, bonus = chooser.judge(proposal, logits)
        tokens = [*proposal.tokens[:accepted], bonus]
        kept = end_text(tokens, room=room, stop_ids=options.stop_ids)
        reader.keep(context.length + kept)
        features = features[:, :kept]
        room -= kept
        anchor = tokens[kept - 1]
        yield Cycle(tuple(tokens[: min(kept, accepted)]), bonus if kept > accepted else None, slots - 1)


@torch.no_grad()
def alone_cycles(target: Target, prompt_ids: Sequence[int], options: DecodeOptions) -> Iterator[Cycle]:
    """The target alone, one token a forward, with the same cache: what speculation is compared with."""
    check_prompt(prompt_ids, options, target.facts, name="prompt")
    chooser = Chooser(options, target.device)
    reader = TargetReader(target, ())
    pending = list(prompt_ids)
    for _ in range(options.max_new_tokens):
        logits, _ = reader.read(pending, last_only=True)
        reader.keep(reader.length)
        token = chooser.next_token(logits[-1])
        yield Cycle((), token, 0)
        if token in options.stop_ids:
            return
        pending = [token]


def speculate(target: Target, drafter: Drafter, prompt_ids: Sequence[int], options: DecodeOptions) -> Decoded:
    """The whole continuation by drafting and verifying; see `speculate_cycles`."""
    return _collect(speculate_cycles(target, drafter, prompt_ids, options))


def target_alone(target: Target, prompt_ids: Sequence[int], options: DecodeOptions) -> Decoded:
    """The whole continuation by the target alone, greedy or sampled; see `alone_cycles`."""
    return _collect(alone_cycles(target, prompt_ids, options))


def _collect(cycles: Iterable[Cycle]) -> Decoded:
    began = time.perf_counter()
    done = tuple(cycles)
    seconds = time.perf_counter() - began
    return Decoded([token for cycle in done for token in cycle.tokens], done, seconds)
