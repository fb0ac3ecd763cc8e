"""Takes a run file, joins what its training needs of rooms that do not know each other: target, prompts, drafters, loop."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.config import load_run
from outrider.errors import UserError


def job_of(run: Path, settings: Sequence[str], *, row_length: int | None, suppositions: Sequence[str]) -> Any:
    """A run file, resolved for a GPU, and its job for the ledger."""
    from outrider.features.facts import read_facts
    from outrider.features.trust import trust_as_asked
    from outrider.planner.run import job_from
    from outrider.train.resolve import resolve

    config = load_run(run, [*settings, "train.device=cuda"])
    trust_as_asked(config.target)
    resolved = resolve(config, read_facts(config.target.path))
    return resolved, job_from(resolved.config, resolved.shape, row_length=row_length, suppositions=suppositions)


def train_here(run: Path, settings: Sequence[str]) -> dict[str, Any]:
    """`train` in this process, alone or as one of several."""
    from outrider.features.trust import trust_as_asked
    from outrider.train.loop import train as start

    config = load_run(run, settings)
    trust_as_asked(config.target)  # before the loop does: the prompts of the acceptance check want its tokenizer
    return start(config, check=acceptance_check(config), initial=initial_drafter(config))


def initial_drafter(config: Any) -> Any:
    """What opens the drafter that a fresh run begins from, or None when the run begins from scratch."""
    from outrider.train.initial import Initial
    from outrider.weights.opening import check_scale, open_drafter, read_target_digest

    path = config.train.init_from
    if path is None:
        return None

    def open_it() -> Initial:
        drafter = open_drafter(path, dtype="float32", device="cpu")
        check_scale(path, config.target.path)
        return Initial(drafter, read_target_digest(path))

    return open_it


def acceptance_check(config: Any) -> Any:
    """What the loop calls to measure the real accepted length on held-out prompts, or None when the run names none.

    Raises UserError for a prompt that the target could not continue: the run would end with it hours later, at its first
    measurement.
    """
    from outrider.data.prompts import read_prompts
    from outrider.features.facts import read_facts
    from outrider.features.target import load_tokenizer, read_stop_ids
    from outrider.verify.decode import check_prompt
    from outrider.verify.sampling import DecodeOptions
    from outrider.verify.score import measure_acceptance

    if config.data.heldout is None:
        if config.train.accept_every is not None:
            raise UserError(f"train.accept_every = {config.train.accept_every}: needs prompts to measure on: set data.heldout")
        return None
    tokenizer = load_tokenizer(config.target.path)
    prompts = read_prompts(config.data.heldout, tokenizer, template_options={})[: config.train.accept_prompts]
    options = DecodeOptions.greedy(max_new_tokens=config.train.accept_tokens,
                                   stop_ids=tuple(read_stop_ids(config.target.path, tokenizer)))
    facts = read_facts(config.target.path)
    for prompt in prompts:
        check_prompt(prompt.ids, options, facts, name=f"data.heldout: {prompt.where}",
                     limit=f"train.accept_tokens = {config.train.accept_tokens}")

    def check(target: Any, drafter: Any) -> Any:
        return measure_acceptance(target, drafter, [prompt.ids for prompt in prompts], options)

    return check
