"""vLLM in its own environment (`make test-engines`): what it drafts and accepts, and what our decoder says that it should."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.verify.decode import Decoded

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
    python: str, target: Path, drafter: Path | None, prompts: Sequence[Sequence[int]], *, drafts: int, limit: int
) -> list[Run]:
    """Greedy texts of `limit` tokens in float32 by the vLLM that `python` has. Raises RuntimeError with its last words."""
    job = {"target": str(target), "drafter": None if drafter is None else str(drafter), "drafts": drafts,
           "prompts": [list(prompt) for prompt in prompts], "limit": limit, "stop_ids": []}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, str(SCRIPT)], input=json.dumps(job), capture_output=True, text=True, timeout=SECONDS,
                          env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")
    return [Run(**run) for run in json.loads(done.stdout.splitlines()[-1])["runs"]]


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
