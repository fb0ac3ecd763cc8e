"""Kills a training process at random moments and looks at what is left; shared by the suite and bench/endure.py."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from outrider.config import RunConfig
from outrider.train.checkpoint import FILES, list_checkpoints, verify_checkpoint
from outrider.train.loop import train


@dataclass
class Tally:
    """What a series of kills came to. `in_save`: kills that left a half-written checkpoint beside the whole ones."""

    kills: int = 0
    in_save: int = 0
    at_step: list[int] = field(default_factory=list)  # the newest checkpoint after each kill
    runs: int = 0
    different_runs: int = 0  # ended with other weights, moments or random generators than the uninterrupted run
    damaged_checkpoints: int = 0  # a folder with a checkpoint's name that does not verify


def in_child(work: Callable[[], object], *, kill_after_s: float | None) -> int:
    """Exit code of `work` in a fork of this process; negative for a kill."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            work()
        except BaseException:
            os._exit(9)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def tensors_of(run: RunConfig) -> dict[str, torch.Tensor]:
    newest = list_checkpoints(run.train.folder)[-1]
    return {f"{file}/{name}": tensor for file in FILES if file.endswith(".safetensors")
            for name, tensor in load_file(newest / file).items()}


def kill_until_done(run: RunConfig, *, seconds: float, draw: random.Random, tally: Tally, most: int) -> None:
    """Start `run` again and again, each start killed within `seconds`, until one ends or there are `most` kills."""
    while tally.kills < most:
        code = in_child(lambda: train(run, check=None), kill_after_s=draw.uniform(0, seconds))
        if code == 0:
            return
        assert code == -signal.SIGKILL, f"the run ended by itself with {code}"
        tally.kills += 1
        look_at(run.train.folder, tally)
    assert in_child(lambda: train(run, check=None), kill_after_s=None) == 0


def look_at(folder: Path, tally: Tally) -> None:
    """Every checkpoint that has a checkpoint's name must verify."""
    found = list_checkpoints(folder)
    for checkpoint in found:
        try:
            verify_checkpoint(checkpoint)
        except ValueError:
            tally.damaged_checkpoints += 1
    tally.in_save += any((folder / "checkpoints").glob(".step-*.partial"))
    tally.at_step.append(int(found[-1].name.removeprefix("step-")) if found else 0)


def crash_series(
    make: Callable[[str], RunConfig], *, kills: int, seed: int, say: Callable[[str], object] = lambda line: None
) -> Tally:
    """Kill runs of `make(name)` until `kills` have been, and compare each with the uninterrupted run, bit for bit."""
    torch.set_num_threads(1)
    whole, draw, tally = make("whole"), random.Random(seed), Tally()
    began = time.monotonic()
    assert in_child(lambda: train(whole, check=None), kill_after_s=None) == 0
    seconds = time.monotonic() - began
    expected, started = tensors_of(whole), time.monotonic()
    while tally.kills < kills:
        run = make(f"run-{tally.runs}")
        kill_until_done(run, seconds=seconds, draw=draw, tally=tally, most=kills)
        tally.runs += 1
        found = tensors_of(run)
        same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        tally.different_runs += not same
        left = (time.monotonic() - started) / tally.kills * (kills - tally.kills)
        say(f"{tally.kills}/{kills} kills, {tally.runs} runs ended, {tally.different_runs} differ, {left:.0f} s left")
    sys.stdout.flush()
    return tally
