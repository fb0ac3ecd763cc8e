"""Two threads in one cold autotuner, with the lock and without: how many of so many fresh processes crash.

    python bench/autotuner.py [--starts 20] [--at-once 10]

Each process has an empty Triton cache, and two threads that begin together to call one autotuned kernel of
flash-linear-attention (a cumulative sum by chunks, over a shape of its own each), on one GPU. Last line: JSON.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading

import torch

from outrider.features import guards

TOKENS = (1024, 2048)


def cold_start(locked: bool) -> str:
    """What one fresh process ends with: "ok", or the last line of its error."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--child", *(["--lock"] if locked else [])], capture_output=True, text=True, timeout=240,
            env={**os.environ, "TRITON_CACHE_DIR": cache}, check=False,
        )
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip().splitlines()[-1]


def child(locked: bool) -> str:
    if locked:
        guards.lock_autotuner()
    from fla.ops.utils import chunk_local_cumsum

    barrier, errors = threading.Barrier(len(TOKENS)), []

    def work(tokens: int, heads: int) -> None:
        torch.cuda.set_device(0)
        values = torch.randn(1, tokens, heads, device="cuda")
        barrier.wait()
        try:
            got = chunk_local_cumsum(values, chunk_size=64)
            if not torch.allclose(got, values.unflatten(1, (-1, 64)).cumsum(2).flatten(1, 2), atol=1e-3):
                errors.append("a wrong sum")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(tokens, heads)) for heads, tokens in enumerate(TOKENS, start=8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors[0] if errors else "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--lock", action="store_true")
    options = parser.parse_args()
    if options.child:
        print(child(options.lock))
        return
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "needs a CUDA GPU"}))
        return
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        ends = {name: pool.map(cold_start, [locked] * options.starts) for name, locked in (("without", False), ("with", True))}
        print(json.dumps({name: dict(collections.Counter(found)) for name, found in ends.items()}))


if __name__ == "__main__":
    main()
