"""Takes a target, a drafter and prompts in tokens, gives the texts drafted and verified; knows nothing of files or training."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.features.facts import TargetFacts
from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.records import DrafterShape
from outrider.verify.cycle import Lanes, TreeLanes
from outrider.verify.execution import EAGER, Execution, StageClock, posted, sent
from outrider.verify.sampling import DecodeOptions, Luck
from outrider.verify.stops import StopStrings

DRAFT, TARGET, PROMPT = "draft", "target", "prompt"  # stages of the clock


@dataclass(frozen=True)
class Cycle:
    """What one target forward gave: draft tokens accepted and kept, then `bonus`, the target's own token.

    `bonus` is None where the text ended (stop or limit) on a draft token. `drafted` counts the slots verified one after another:
    0 in the forward of the prompt, and in a tree no further than the path that was followed branches.
    """

    accepted: tuple[int, ...]
    bonus: int | None
    drafted: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.accepted if self.bonus is None else (*self.accepted, self.bonus)

    def cut(self, kept: int) -> "Cycle":
        """The cycle with only its first `kept` tokens."""
        return Cycle(self.accepted[:kept], self.bonus if kept > len(self.accepted) else None, self.drafted)


@dataclass(frozen=True)
class Decoded:
    """A continuation: new tokens (the stop token included, nothing after it), one cycle a target forward, wall seconds.

    The first cycle is the prompt's own forward; accepted lengths count the later ones, and only tokens that were kept.
    `seconds`: from the beginning of its batch to the end of this text.
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


@dataclass(frozen=True)
class DecodedBatch:
    """Texts in the order of their prompts, and where the time went, in seconds.

    `prompt_seconds`: reading the prompts, one entry a batch. `draft_seconds`, `target_seconds`: of each cycle of each batch,
    on the device's clock. `seconds`: the wall of all batches, prompts included, `setup_seconds` (compilation) not.
    """

    texts: list[Decoded]
    prompt_seconds: list[float]
    draft_seconds: list[float]
    target_seconds: list[float]
    seconds: float
    setup_seconds: float


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


def check_prompt(
    prompt_ids: Sequence[int], options: DecodeOptions, facts: TargetFacts, *, name: str, limit: str = "max_new_tokens"
) -> None:
    """Raises UserError for a prompt that cannot be continued; `name` begins the message, `limit` is where new tokens are set."""
    if not prompt_ids:
        raise UserError(f"{name}: is empty: give at least one token")
    outside = [token for token in prompt_ids if not 0 <= token < facts.vocab_size]
    if outside:
        raise UserError(f"{name}: token {outside[0]} is outside the target's vocabulary of {facts.vocab_size}: use the "
                        "target's tokenizer")
    room = max(0, facts.max_position_embeddings - options.max_new_tokens)
    if len(prompt_ids) > room:
        raise UserError(f"{name}: has {len(prompt_ids)} tokens, but the target's {facts.max_position_embeddings} positions leave "
                        f"room for {room} beside {options.max_new_tokens} new ones: shorten it or lower {limit}")


def check_weights(drafter: Drafter) -> None:
    """Raises UserError when a weight is not a number: what it drafts would be rejected, and nobody would know why."""
    for name, parameter in drafter.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"drafter: tensor '{name}' holds values that are not finite: use an earlier checkpoint")


@dataclass
class Decoder:
    """Continues batches of up to `rows` prompts, of up to `longest` tokens each; what is compiled or captured serves them all.

    `drafter` None is the target alone: the same machinery with blocks of one token, which is what speculation is compared with.
    Raises UserError when target and drafter do not fit.
    """

    target: Target
    drafter: Drafter | None
    options: DecodeOptions
    rows: int
    longest: int
    execution: str
    setup_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        began = time.perf_counter()
        if self.drafter is not None:
            check_fit(self.drafter.shape, self.target.facts)
            check_weights(self.drafter)
        execution = Execution(self.execution, self.target.device)
        block = self.drafter.shape.block_size if self.drafter else 1
        read = max(block, self.options.tree_budget + 1)
        capacity = self.longest + self.options.max_new_tokens + read
        if self.drafter is not None and self.options.tree_budget:
            self.lanes: Lanes = TreeLanes(self.target, self.drafter, self.options, rows=self.rows, capacity=capacity,
                                          execution=execution)
        else:
            self.lanes = Lanes(self.target, self.drafter, self.options, rows=self.rows, capacity=capacity, execution=execution)
        if self.execution != EAGER:
            self.lanes.begin([[0]] * self.rows, self._luck([0] * self.rows))
        self._draft = execution.captured(self.lanes.draft) if self.drafter else None
        self._verify = execution.captured(self.lanes.verify)
        self.clock, self.ahead = StageClock(self.target.device), execution.ahead
        self.setup_seconds = time.perf_counter() - began

    def _luck(self, seeds: Sequence[int]) -> Luck | None:
        return None if self.options.greedy_choice else Luck(seeds, K=self.lanes.K)

    def cycles(
        self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], stops: StopStrings | None
    ) -> Iterator[list[Cycle | None]]:
        """Draft and verify (01-dflash), yielding as the texts grow: first the token after each prompt, then a cycle a forward.

        One entry a prompt, None for a text that had ended before. With P prompt tokens the first new token stands at position P
        and is the first anchor; context is what stands before the anchor. `seeds`: one a prompt, unused when greedy.
        Raises UserError for a prompt that cannot be continued.
        """
        assert len(prompts) == len(seeds) <= self.rows
        for i, prompt in enumerate(prompts):
            check_prompt(prompt, self.options, self.target.facts, name=f"prompt {i + 1}")
        lanes, idle = self.lanes, self.rows - len(prompts)
        luck = self._luck([*seeds, *[0] * idle])
        with self.clock.stage(PROMPT):
            logits_BV = lanes.begin([*prompts, *[prompts[0]] * idle], luck)
        if not logits_BV.isfinite().all():
            raise UserError("target: its logits are not finite: its weights are damaged, fetch or save the model again")
        lanes.alive_B[len(prompts) :] = False
        texts = [stops.text() if stops else None for _ in prompts]
        ended = [False] * len(prompts)
        launched: deque[Callable[[], Tensor]] = deque()
        found: list[Cycle | None] = [Cycle((), anchor, 0) for anchor in lanes.anchor_B[: len(prompts)].tolist()]
        alive = lanes.alive_B[: len(prompts)].tolist()
        while True:
            for row, (text, cycle) in enumerate(zip(texts, found, strict=True)):
                kept = text.add(cycle.tokens) if text and cycle else None
                if cycle and kept is not None:
                    found[row], alive[row] = cycle.cut(kept), False
                    lanes.alive_B[row] = False
            yield found
            ended = [was or not still for was, still in zip(ended, alive, strict=True)]
            if all(ended):
                return
            while len(launched) <= self.ahead:
                launched.append(self._launch(luck))
            found, alive = _read(launched.popleft(), ended)

    def _launch(self, luck: Luck | None) -> Callable[[], Tensor]:
        """Begin one cycle; what is given waits for its report."""
        if luck is not None:
            self.lanes.luck_BX.copy_(sent(luck.throw(), self.target.device))
        if self._draft is not None:
            with self.clock.stage(DRAFT):
                self._draft()
        with self.clock.stage(TARGET):
            self._verify()
        return posted(self.lanes.report_BX)

    def decode(self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], stops: StopStrings | None) -> list[Decoded]:
        """The whole continuations of up to `rows` prompts; see `cycles`."""
        began = time.perf_counter()
        cycles: list[list[Cycle]] = [[] for _ in prompts]
        seconds = [0.0] * len(prompts)
        for found in self.cycles(prompts, seeds=seeds, stops=stops):
            for row, cycle in enumerate(found):
                if cycle is not None:
                    cycles[row].append(cycle)
                    seconds[row] = time.perf_counter() - began
        return [Decoded([token for cycle in row for token in cycle.tokens], tuple(row), wall)
                for row, wall in zip(cycles, seconds, strict=True)]


def _read(report: Callable[[], Tensor], ended: Sequence[bool]) -> tuple[list[Cycle | None], list[bool]]:
    """What each row gave in a cycle (None where its text had ended) and which go on."""
    found: list[Cycle | None] = []
    alive = []
    for was_ended, (kept, accepted, drafted, still, *tokens) in zip(ended, report().tolist(), strict=False):
        cycle = Cycle(tuple(tokens[: min(kept, accepted)]), tokens[kept - 1] if kept > accepted else None, drafted)
        found.append(None if was_ended else cycle)
        alive.append(bool(still))
    return found, alive


def decode(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], options: DecodeOptions, *, batch_size: int,
    execution: str, stops: StopStrings | None,
) -> DecodedBatch:
    """Continue `prompts`, `batch_size` side by side, with the drafter or (None) by the target alone.

    Prompt i is sampled with seed `options.seed + i`, whatever the batch. Raises UserError when target, drafter and prompts do not
    fit, before any work.
    """
    if not prompts:
        raise UserError("prompts: there are none: give at least one")
    for i, prompt in enumerate(prompts):
        check_prompt(prompt, options, target.facts, name=f"prompt {i + 1}")
    decoder = Decoder(target, drafter, options, rows=min(batch_size, len(prompts)), longest=max(len(p) for p in prompts),
                      execution=execution)
    began, texts = time.perf_counter(), []
    for start in range(0, len(prompts), decoder.rows):
        batch = prompts[start : start + decoder.rows]
        texts += decoder.decode(batch, seeds=range(options.seed + start, options.seed + start + len(batch)), stops=stops)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    seconds = time.perf_counter() - began
    prompt_seconds, draft_seconds, target_seconds = (decoder.clock.seconds(stage) for stage in (PROMPT, DRAFT, TARGET))
    return DecodedBatch(texts, prompt_seconds, draft_seconds, target_seconds, seconds, decoder.setup_seconds)


def speculate(target: Target, drafter: Drafter, prompt_ids: Sequence[int], options: DecodeOptions) -> Decoded:
    """The whole continuation of one prompt by drafting and verifying, eager."""
    check_prompt(prompt_ids, options, target.facts, name="prompt")
    return decode(target, drafter, [prompt_ids], options, batch_size=1, execution=EAGER, stops=None).texts[0]


def target_alone(target: Target, prompt_ids: Sequence[int], options: DecodeOptions) -> Decoded:
    """The whole continuation of one prompt by the target alone, greedy or sampled, eager."""
    check_prompt(prompt_ids, options, target.facts, name="prompt")
    return decode(target, None, [prompt_ids], options, batch_size=1, execution=EAGER, stops=None).texts[0]
