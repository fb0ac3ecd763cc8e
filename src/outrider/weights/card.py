"""Takes a drafter's shape and the run it came from, gives the model card of an export (README.md); writes nothing.

What the run folder does not hold is said to be absent, never filled in.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import load_run
from outrider.data.info import read_info
from outrider.errors import UserError
from outrider.model.flops import count_parameters
from outrider.records import DrafterShape
from outrider.report.metrics import METRICS_NAME, MeasuredLine, read_metrics
from outrider.train.checkpoint import read_state
from outrider.train.folder import RESOLVED_NAME
from outrider.verify.page import EVALUATION_NAME, markdown, read_page
from outrider.weights.golden import GOLDEN_NAME, STAGES

CARD_NAME = "README.md"


@dataclass(frozen=True)
class CardSource:
    """Where a card's drafter comes from: a checkpoint after `step` steps; `run` and `evaluation`: its run folder and what lies
    there of `outrider evaluate`, of whatever drafter, or None."""

    step: int
    run: Path | None
    evaluation: Mapping[str, Any] | None


def read_source(checkpoint: Path) -> CardSource:
    """Raises UserError when the run's evaluation cannot be read."""
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
    evaluation = read_page(run / EVALUATION_NAME) if run is not None and (run / EVALUATION_NAME).is_file() else None
    return CardSource(read_state(checkpoint)["position"]["step"], run, evaluation)


def model_card(
    shape: DrafterShape, *, target: str, source: CardSource, weights: Collection[str | None], serve: Mapping[str, str],
    golden: bool, code: bool,
) -> str:
    """The card, in Markdown with the metadata block of model hubs. `weights`: digests (`opening.weights_digest`) of this drafter,
    of which an evaluation must name one to be shown. `code`: Python code of the target's own was let run for the export, as it
    may have been for the run."""
    name, run = Path(target).name, source.run
    parts = [
        _front_matter(target),
        f"# A DFlash drafter for {name}\n\nDrafts {shape.block_size - 1} tokens a step for {name}, which verifies them: the "
        "answers stay the target's own. Trained with Outrider; method: DFlash, arXiv 2602.06036.",
        "## The drafter\n\n" + _table(_facts(shape)),
        "## Measured\n\n" + _measured(source, weights),
        "## Serve\n\n" + "\n\n".join(f"{engine}:\n```\n{command}\n```" for engine, command in serve.items()),
    ]
    if code or (run is not None and (run / RESOLVED_NAME).is_file() and load_run(run / RESOLVED_NAME).target.trust_remote_code):
        parts.append("## The target's own code\n\nThis target comes with Python code of its own, which was let run "
                     "(`trust_remote_code`) when this drafter was made. An engine that serves the target wants "
                     "`--trust-remote-code` too: read that code first.")
    if golden:
        parts.append(f"## Check an engine\n\n`{GOLDEN_NAME}` holds one draft with every stage ({', '.join(STAGES)}), computed in "
                     "float32 from these weights. `outrider.weights.golden.check_golden` compares what an engine computed and "
                     "names the first stage that differs.")
    parts += ["## Data\n\n" + _data(run), "## Recipe\n\n" + _recipe(run)]
    return "\n\n".join(parts) + "\n"


def _front_matter(target: str) -> str:
    hub = target.count("/") == 1 and not target.startswith((".", "/", "~")) and not Path(target).exists()
    lines = [f"base_model: {target}"] if hub else []
    return "\n".join(["---", *lines, "tags:", "- speculative-decoding", "- dflash", "---"])


def _facts(shape: DrafterShape) -> dict[str, str]:
    return {
        "parameters": f"{count_parameters(shape) / 1e6:.1f} M, without embedding and head: those are the target's",
        "layers": f"{shape.num_layers} ({', '.join(dict.fromkeys(shape.layer_types))}"
                  + (f", window {shape.sliding_window})" if shape.sliding_window else ")"),
        "block size": f"{shape.block_size}: the anchor and {shape.block_size - 1} drafted tokens",
        "mask token": str(shape.mask_token_id),
        "features": f"outputs of the target's layers {', '.join(map(str, shape.target_layer_ids))} (0-based, of "
                    f"{shape.num_target_layers})",
        "vocabulary": f"{shape.vocab_size:,}",
    }


def _table(rows: Mapping[str, str]) -> str:
    cells = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *cells])


def _measured(source: CardSource, weights: Collection[str | None]) -> str:
    """The run's evaluation where it is of these weights, else the accepted length that training measured at this step."""
    run, evaluation = source.run, source.evaluation
    if evaluation is not None and evaluation["conditions"].get("drafter_sha256") in set(weights) - {None}:
        return markdown(evaluation)
    last = _measurement_at(run, source.step) if run is not None else None
    if run is None or last is None:
        why = "no evaluation lies in the run folder" if evaluation is None else "the run folder's evaluation is of other weights"
        return (f"Not measured: {why}. `outrider evaluate ... --drafter CHECKPOINT --page RUN/{EVALUATION_NAME}` writes one, and "
                "the next export of that checkpoint carries it.")
    settings = load_run(run / RESOLVED_NAME).train
    slots = ", ".join(f"{share:.2f}" for share in last.acceptance_by_slot)
    return _table({
        "accepted length tau": f"{last.tau:.3f} tokens per target forward, the target's own token included (1 is no help)",
        "acceptance by slot, given all slots before": slots,
        "conditions": f"step {last.step}; greedy, {settings.accept_prompts} held-out prompts of up to "
                      f"{settings.accept_tokens} tokens, {last.tokens:,} tokens in {last.forwards:,} target forwards",
        "speed": "not measured",
    })


def _measurement_at(run: Path, step: int) -> MeasuredLine | None:
    if not (run / METRICS_NAME).is_file() or not (run / RESOLVED_NAME).is_file():
        return None
    found = [line for line in read_metrics(run).measured if line.step == step]
    return found[-1] if found else None


def _data(run: Path | None) -> str:
    if run is None or not (run / RESOLVED_NAME).is_file():
        return "Not known: the checkpoint lies in no run folder."
    rows = load_run(run / RESOLVED_NAME).data.rows
    try:
        audit = read_info(rows)["audit"]
    except (UserError, KeyError) as error:
        return f"The rows are not there any more ({error})."
    return _table({key.replace("_", " "): f"{value:,}" for key, value in audit.items() if isinstance(value, int)})


def _recipe(run: Path | None) -> str:
    if run is None or not (run / RESOLVED_NAME).is_file():
        return "Not known: the checkpoint lies in no run folder."
    return f"```toml\n{(run / RESOLVED_NAME).read_text(encoding='utf-8').strip()}\n```"
