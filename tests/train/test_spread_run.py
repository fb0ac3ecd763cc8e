"""A whole run whose target is spread over several devices: the colocated run, bit for bit, and refusals before it begins."""

from collections.abc import Callable
from typing import Any

import pytest
from test_forecast import card
from test_loop import assert_same_run

from outrider.config import RunConfig, parse_run
from outrider.errors import UserError
from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.records import AcceptReport
from outrider.train.loop import train

MakeRun = Callable[..., RunConfig]
SPREAD = {"placement.capture_cards": 2, "placement.cards_per_target": 2}


@pytest.mark.parametrize("changes", [
    {}, {"features.documents": "packed", "features.precision": "fp8"}, {"features.keep": "disk"},
    {"placement.capture_cards": 6, "placement.cards_per_target": 3, "train.accumulation": 2},
], ids=["bf16", "packed fp8", "kept", "two targets over three each"])
def test_a_spread_run_is_the_colocated_run(
    make_run: MakeRun, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {key: value for key, value in changes.items() if not key.startswith("placement")}
    plain, spread = make_run("plain", **shared), make_run("spread", **SPREAD | changes)
    train(plain, check=None)
    train(spread, check=None, card_of=lambda device: card())
    assert_same_run(plain, spread)
    assert "target: its layers are spread over" in capsys.readouterr().err


def test_a_spread_target_answers_for_the_acceptance_check(make_run: MakeRun) -> None:
    answers: list[list[list[int]]] = []

    def check(target: Target, drafter: Drafter) -> AcceptReport:
        assert target.whole
        answers.append(target.answer([[5, 6, 7]], max_new_tokens=6, stop_ids=[258], temperature=0.0, top_p=1.0, top_k=0, seed=0))
        return AcceptReport([], tokens=10, forwards=10, drafted_K=[1] * 4, accepted_K=[0] * 4, seconds=0.1)

    measured = {"train.accept_every": 5, "data.heldout": "held.jsonl"}
    plain, spread = make_run("plain", **measured), make_run("spread", **measured, **SPREAD)
    train(plain, check=check)
    train(spread, check=check)
    assert len(answers) == 4
    assert answers[:2] == answers[2:]
    assert_same_run(plain, spread)


def test_a_spread_run_that_cannot_fit_is_refused_before_it_begins(make_run: MakeRun) -> None:
    config = make_run(**SPREAD)
    with pytest.raises(UserError, match=r"the run needs .* GiB in '.*', pretended card has"):
        train(config, check=None, card_of=lambda device: card(2**20))
    assert not config.train.folder.exists()
    with pytest.raises(UserError, match=r"cards_per_target = 7: the target has 5 layers to share out: use fewer"):
        train(make_run(**{"placement.capture_cards": 7, "placement.cards_per_target": 7}), check=None)
    assert not config.train.folder.exists()


@pytest.mark.parametrize(("cards", "each"), [(0, 2), (3, 2), (2, 4)])
def test_cards_that_do_not_come_out_even(make_run: MakeRun, cards: int, each: int) -> None:
    document = make_run().model_dump(mode="json")
    document["placement"] |= {"capture_cards": cards, "cards_per_target": each}
    with pytest.raises(UserError, match=rf"cards_per_target.*= {each}.*capture_cards = {cards}: that must be a multiple of it"):
        parse_run(document, where="run.toml")


