"""Runs a function in several processes that sum over gloo; they fork from a server that imports torch once (6 s each)."""

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from outrider.errors import UserError
from outrider.train.processes import Processes, join

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "outrider.train.loop"])


def in_processes(count: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 100) -> list[Any]:
    """`work(processes, *arguments)` in `count` processes; gives their results by rank. A failure of one fails the test."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pipes = [FORKS.Pipe(duplex=False) for _ in range(count)]
    children = [FORKS.Process(target=_child, args=(rank, count, port, pipes[rank][1], work, arguments)) for rank in range(count)]
    for child in children:
        child.start()
    try:
        results = []
        for rank, (reading, _) in enumerate(pipes):
            if not wait([reading, children[rank].sentinel], timeout=timeout_s):
                raise AssertionError(f"process {rank} gave nothing within {timeout_s} s")
            assert reading.poll(5), f"process {rank} ended without a result, exit code {children[rank].exitcode}"
            result, failure = pickle.loads(reading.recv_bytes())
            assert failure is None, f"process {rank}:\n{failure}"
            results.append(result)
        return results
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()


def _child(rank: int, count: int, port: int, pipe: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}
    try:
        with join(accelerator=False, timeout_s=60) as processes:
            assert isinstance(processes, Processes)
            pipe.send_bytes(pickle.dumps((work(processes, *arguments), None)))  # tensors by value: this process may end first
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
        sys.exit(1)


def refuse(number: int) -> None:
    if os.environ["RANK"] == "1":
        raise UserError(f"field = {number}: must be less: lower it")
    time.sleep(60)


def break_down() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("out of luck")
    time.sleep(60)
