"""Kills a training process at random moments and looks at what is left; shared by the suite and bench/endure.py."""

import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tqdm.auto
from checkpoints import tensors_in

from outrider.config import RunConfig
from outrider.train.checkpoint import list_checkpoints, verify_checkpoint
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


def forked(work: Callable[[], object], environment: dict[str, str]) -> int:
    """The number of a fork of this process that does `work` and ends with 0, or with 9 when it raised."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.environ.update(environment)
        heard, silence = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for bar in (tqdm.std.tqdm, tqdm.auto.tqdm):  # its lock is one of all forks, and a killed one would keep it for ever
            bar.set_lock(threading.RLock())
        try:
            work()
        except BaseException:
            os.write(heard, traceback.format_exc().encode())  # of one whose peer was killed too
            os._exit(9)
        os._exit(0)
    return child


def in_children(work: Callable[[], object], count: int, *, kill_after_s: float | None, draw: random.Random) -> list[int]:
    """Exit codes of `work` in so many forks that train together, by rank; negative for a kill.

    Of several either all are killed at the same moment, as a machine that fails would, or a random one, and the others must find
    out by themselves.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    places = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {} for rank in range(count)]
    children = [forked(work, place) for place in places]
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        for child in children if draw.random() < 0.5 else [draw.choice(children)]:
            os.kill(child, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def tensors_of(run: RunConfig) -> dict[str, torch.Tensor]:
    return tensors_in(list_checkpoints(run.train.folder)[-1])


def kill_until_done(run: RunConfig, count: int, *, seconds: float, draw: random.Random, tally: Tally, most: int) -> None:
    """Start `run` again and again, each start killed within `seconds`, until one ends or there are `most` kills."""
    while tally.kills < most:
        codes = in_children(lambda: train(run, check=None), count, kill_after_s=draw.uniform(0, seconds), draw=draw)
        if not any(codes):
            return
        assert -signal.SIGKILL in codes, f"the run ended by itself with {codes}"
        tally.kills += 1
        look_at(run.train.folder, tally)
    assert not any(in_children(lambda: train(run, check=None), count, kill_after_s=None, draw=draw))


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
    make: Callable[[str], RunConfig], *, kills: int, seed: int, processes: int = 1,
    say: Callable[[str], object] = lambda line: None,
) -> Tally:
    """Kill runs of `make(name)` until `kills` have been, and compare each with the uninterrupted run, bit for bit.

    Each in so many `processes`, which must have micro-batches enough.
    """
    torch.set_num_threads(1)
    whole, draw, tally = make("whole"), random.Random(seed), Tally()
    began = time.monotonic()
    assert not any(in_children(lambda: train(whole, check=None), processes, kill_after_s=None, draw=draw))
    seconds = time.monotonic() - began
    expected, started = tensors_of(whole), time.monotonic()
    while tally.kills < kills:
        run = make(f"run-{tally.runs}")
        kill_until_done(run, processes, seconds=seconds, draw=draw, tally=tally, most=kills)
        tally.runs += 1
        found = tensors_of(run)
        same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        tally.different_runs += not same
        left = (time.monotonic() - started) / max(tally.kills, 1) * (kills - tally.kills)
        say(f"{tally.kills}/{kills} kills, {tally.runs} runs ended, {tally.different_runs} differ, {left:.0f} s left")
    sys.stdout.flush()
    return tally
