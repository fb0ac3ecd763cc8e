"""Takes a run that has not stepped yet, runs one step on its worst rows and moves nothing: what the memory must hold, found at
once. Knows nothing of plans."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from outrider.data.rows import PreparedRows, RowError
from outrider.records import PADDING_DOCUMENT, Features, TokenRows
from outrider.train.incidents import logits_bytes
from outrider.train.meter import Stopwatch
from outrider.train.optim import set_rate
from outrider.train.placement import Relay
from outrider.train.start import Run
from outrider.train.step import lay_out, run_step

ROWS_LOOKED_AT = 256
MICRO_BATCHES = 2  # from the second on the gradients of the first stand beside its own


def rehearse(run: Run, watch: Stopwatch) -> None:
    """A whole step on the rows with the longest documents. Weights, moments, random numbers and the order of rows are those of
    a run that never did it; it compiles what is compiled, and the optimizer's moments come into being, all zero."""
    settings, device = run.resolved.config.train, run.device
    rows = worst_rows(run.rows, settings.rows_per_batch)
    if rows is None:
        return
    learner = replace(run.learner, optimizer=cast(torch.optim.Optimizer, Standstill(run.learner.optimizer)))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        batch = lay_out(rows, run.resolved, [0] * settings.rows_per_batch, device)
        batches = [batch] * min(-(-settings.accumulation // run.processes.count), MICRO_BATCHES)
        with contextlib.suppress(FloatingPointError):  # the guards of the real steps know what to do with such a row
            run_step(learner, OutOfTurn(run.relay), batches, [], clip_norm=run.resolved.config.optimizer.clip_norm,
                     logits_bytes=logits_bytes(run), watch=watch)
    run.learner.masters.rest()


class OutOfTurn:
    """Features from a run's relay without a place in its order."""

    ahead = 0

    def __init__(self, relay: Relay) -> None:
        self.relay = relay

    def features(self, rows: TokenRows) -> Features:
        return self.relay.again(rows)

    def again(self, rows: TokenRows) -> Features:
        return self.relay.again(rows)

    def expect(self, coming: Sequence[TokenRows]) -> None:
        pass

    def mark(self, label: str) -> None:
        pass


def worst_rows(rows: PreparedRows, count: int) -> TokenRows | None:
    """`count` rows, among the first ROWS_LOOKED_AT, with the longest documents: a target that runs each document on its own is
    fullest there, everything else has fixed shapes. None where none can be read."""
    lengths: dict[int, int] = {}
    for row in range(min(len(rows), ROWS_LOOKED_AT)):
        with contextlib.suppress(RowError):  # left out and named when its turn comes
            documents_S = rows.batch([row]).document_ids_BS[0]
            lengths[row] = int(torch.bincount(documents_S[documents_S != PADDING_DOCUMENT]).max())
    ranked = sorted(lengths, key=lambda row: -lengths[row])
    return rows.batch([ranked[i % len(ranked)] for i in range(count)]) if ranked else None


class Standstill:
    """An optimizer in whose step each parameter gets its moments, as zero as they begin, and none moves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        if self.optimizer.state:  # read from a checkpoint: in being already
            return
        rate = float(self.optimizer.param_groups[0]["lr"])  # one for all groups
        set_rate(self.optimizer, 0.0)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self.optimizer.step()
        set_rate(self.optimizer, rate)
        for state in self.optimizer.state.values():
            state["step"].zero_()
