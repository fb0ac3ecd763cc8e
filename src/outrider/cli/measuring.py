"""Takes what `evaluate` was asked, joins what it needs of rooms that do not know each other: prompts, both models, a server."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import UserError

LOOKUP = "lookup"  # the rival that is no drafter


@dataclass(frozen=True)
class Here:
    """How both models are run on this machine, as the verb's options say it. `rivals`: folders of other drafters, or LOOKUP."""

    batch_sizes: tuple[int, ...]
    execution: str | None
    rivals: tuple[str, ...]
    dtype: str
    device: str


@dataclass(frozen=True)
class There:
    """The server that answers instead, as the verb's options say it; `engine` None is none."""

    engine: str | None
    base_url: str | None
    baseline_url: str | None
    concurrency: int


def measure(questions: Any, options: Any, target: str, drafter: Path | None, here: Here, there: There) -> dict[str, Any]:
    """The result of `evaluate` on questions and with decoding options that fit the target. Raises UserError."""
    from outrider.weights.opening import find_drafter, weights_digest

    if there.engine is not None:
        digest = None if drafter is None else weights_digest(drafter)
        result = _measure_there(questions, options, here, there)
    elif drafter is None:
        raise UserError("--drafter: is missing: name its folder, or measure a server with --engine and --base-url")
    elif (there.base_url, there.baseline_url, there.concurrency) != (None, None, 1):
        raise UserError("--base-url, --baseline-url, --concurrency: are of a server: say with --engine which one answers")
    else:
        drafter = find_drafter(drafter)  # of a run the newest now: a run that goes on has a newer one when this ends
        digest = weights_digest(drafter)
        result = _measure_here(questions, options, target, drafter, here)
    for one in (result, *result.get("speed_by_batch", ())):
        if one["first_difference"] is not None:
            one["first_difference"]["where"] = questions.wheres[one["first_difference"]["prompt"]]
    result["conditions"] |= {"source": questions.source, "target": target, "drafter_sha256": digest,
                             "drafter": None if drafter is None else str(drafter)}
    return result


def check_questions(questions: Any, options: Any, target: str) -> None:
    """Raises UserError, before any model is loaded, for a prompt that the target could not continue."""
    from outrider.features.facts import read_facts
    from outrider.verify.decode import check_prompt

    facts = read_facts(target)
    for ids, where in zip(questions.prompts, questions.wheres, strict=True):
        check_prompt(ids, options, facts, name=where, limit="--max-new-tokens")


def load_pair(target: str, drafter: Path, dtype: str, device: str) -> Any:
    """Target and drafter, that of the drafter checked against it. Raises UserError."""
    from outrider.features.target import load_target
    from outrider.weights.opening import check_scale, open_drafter, warn_of_other_target

    opened = open_drafter(drafter, dtype=dtype, device=device)  # the small one first: its errors come at once
    check_scale(drafter, target)
    warn_of_other_target(drafter, target)
    return load_target(target, dtype=dtype, device=device, last_layer=None, head=True), opened


def _grade(questions: Any) -> Any:
    return questions.grade if any(answer is not None for answer in questions.answers) else None


def _measure_here(questions: Any, options: Any, target: str, drafter: Path, here: Here) -> dict[str, Any]:
    from outrider.model.drafter import Drafter
    from outrider.verify.evaluate import Trial, evaluate
    from outrider.verify.execution import COMPILED, EAGER
    from outrider.weights.opening import open_drafter

    execution = here.execution or (EAGER if here.device == "cpu" else COMPILED)
    trial = Trial(here.batch_sizes, execution, _grade(questions))
    loaded, opened = load_pair(target, drafter, here.dtype, here.device)
    rivals: Mapping[str, Drafter | None] = {
        name: None if name == LOOKUP else open_drafter(Path(name), dtype=here.dtype, device=here.device) for name in here.rivals}
    return evaluate(loaded, opened, questions.prompts, options, trial, kinds=questions.kinds, rivals=rivals)


def _measure_there(questions: Any, options: Any, here: Here, there: There) -> dict[str, Any]:
    from outrider.verify.served import Server, evaluate_server, refuse_given

    assert there.engine is not None
    refuse_given(tree_budget=options.tree_budget > 0, batch_size=here.batch_sizes != (1,), execution=here.execution is not None,
                 rival=bool(here.rivals), dtype=here.dtype != "float32", device=here.device != "cpu")
    server = Server(there.engine, there.base_url, there.baseline_url, there.concurrency)
    return evaluate_server(server, questions.prompts, options, kinds=questions.kinds, grade=_grade(questions))
