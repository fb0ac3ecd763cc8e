"""A run cut off anywhere and resumed answers as an uninterrupted one; records hold the exact tokens; failures are counted."""

import json
import random
from dataclasses import replace

import pytest

from outrider.data.prepare import PrepareOptions, prepare
from outrider.data.respond import RespondOptions, respond
from outrider.data.rows import load_rows
from outrider.errors import UserError

OPTIONS = RespondOptions(target="toy", sampling={"temperature": 1.0}, max_prompt_tokens=100, max_new_tokens=9, batch_size=4,
                         seed=5, stop_token_ids=(), template_options={})


class Toy:
    """A target that draws its answers from the seed and the whole batch, as a real sampler does."""

    def __init__(self, tokenizer):
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.batches = []

    def __call__(self, prompt_ids, *, seed):
        self.batches.append([len(ids) for ids in prompt_ids])
        draw = random.Random(f"{seed} {prompt_ids}")
        answers = []
        for _ in prompt_ids:
            ids = [draw.randrange(97, 123) for _ in range(draw.randint(1, 9))]
            answers.append([*ids[:-1], self.end] if draw.random() < 0.7 else ids)
        return answers


@pytest.fixture
def toy(tokenizer):
    return Toy(tokenizer)


@pytest.fixture
def prompts(write_jsonl):
    draw = random.Random(0)
    lines = [{"prompt": "x" * draw.randint(1, 40), "kind": f"k{number}"} for number in range(22)]
    return write_jsonl(*lines, name="prompts.jsonl")


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_hold_the_exact_tokens(write_jsonl, tokenizer, tmp_path):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    path = write_jsonl({"prompt": "hi", "id": "a7", "response": "not the target's"},
                       {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "yo"}]})
    yes, cut = tokenizer("yes")["input_ids"], tokenizer("on and on")["input_ids"]
    split = [tokenizer.convert_tokens_to_ids("Ċ")] * 2  # "\n\n" as two tokens: the text tokenised again would be one

    def answer(prompt_ids, *, seed):
        made = {tokenizer("hi")["input_ids"][0]: [*yes, *split, end, end, end], tokenizer("yo")["input_ids"][0]: cut}
        return [next(new for mark, new in made.items() if mark in ids[-30:]) for ids in prompt_ids]

    out = tmp_path / "answers.jsonl"
    result = respond(path, answer=answer, tokenizer=tokenizer, out=out, options=OPTIONS)
    first, second = sorted(records(out), key=lambda record: record["prompt_id"])
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(first["input_ids"]) == prompt + "yes\n\n<|im_end|>"
    produced = [token for token, supervised in zip(first["input_ids"], first["loss_mask"], strict=True) if supervised]
    assert produced == [*yes, *split, end]  # padding after the stop token is cut off
    assert first["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes\n\n"}]
    assert (first["finish"], first["id"], first["prompt_id"]) == ("stop", "a7", 0)
    assert "response" not in first
    assert second["finish"] == "length"
    assert second["messages"][2] == {"role": "assistant", "content": "on and on"}
    assert sum(second["loss_mask"]) == len(cut)
    assert {key: result[key] for key in ("prompts", "answered", "failed", "tokens", "reused")} == {
        "prompts": 2, "answered": 2, "failed": 0, "tokens": len(produced) + len(cut), "reused": 0}
    assert result["seconds"] >= 0
    options = PrepareOptions(vocab_size=300, row_length=128, supervise="all", on_bad_record="stop", max_unsupervised_share=0,
                             max_bad_share=1.0, stop_token_ids=(), template_options={})
    assert prepare([out], tokenizer=tokenizer, out=tmp_path / "rows", options=options)["supervised_tokens"] == result["tokens"]
    row = load_rows(tmp_path / "rows").batch([0])
    assert first["input_ids"] in [row.input_ids_BS[0][row.document_ids_BS[0] == document].tolist() for document in (0, 1)]


def test_without_a_template(write_jsonl, make_tokenizer, tmp_path):
    plain = make_tokenizer(None)
    respond(write_jsonl({"prompt": "hi"}), answer=Toy(plain), tokenizer=plain, out=tmp_path / "a.jsonl", options=OPTIONS)
    (record,) = records(tmp_path / "a.jsonl")
    assert record["prompt"] == "hi"
    assert plain.decode(record["input_ids"]).startswith("hi" + record["response"])
    with pytest.raises(UserError, match="give the target's stop_token_ids"):
        respond(write_jsonl({"prompt": "hi"}), answer=Toy(plain), tokenizer=make_tokenizer(None, eos=None),
                out=tmp_path / "b.jsonl", options=OPTIONS)


def test_batches_are_even_and_the_longest_come_first(prompts, toy, tokenizer, tmp_path):
    respond(prompts, answer=toy, tokenizer=tokenizer, out=tmp_path / "a.jsonl", options=OPTIONS)
    lengths = [length for batch in toy.batches for length in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in toy.batches] == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("killed_in", range(6))
@pytest.mark.parametrize("lost", [0, 1, 30, 10_000])
def test_killed_and_resumed_equals_uninterrupted(prompts, toy, tokenizer, tmp_path, killed_in, lost):
    whole = respond(prompts, answer=toy, tokenizer=tokenizer, out=tmp_path / "whole.jsonl", options=OPTIONS)

    def dying(prompt_ids, *, seed):
        if len(toy.batches) == 6 + killed_in:
            raise KeyboardInterrupt
        return toy(prompt_ids, seed=seed)

    out = tmp_path / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        respond(prompts, answer=dying, tokenizer=tokenizer, out=out, options=OPTIONS)
    # A kill in the middle of a write loses the end of the last batch: cut into its last line, or into the batch before that.
    data = out.read_bytes()
    out.write_bytes(data[:max(len(data) - lost, 0)])
    left = out.read_bytes().count(b"\n")
    resumed = respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)
    by_prompt = sorted(records(out), key=lambda record: record["prompt_id"])
    assert by_prompt == sorted(records(tmp_path / "whole.jsonl"), key=lambda record: record["prompt_id"])
    assert [record["prompt_id"] for record in by_prompt] == list(range(22))
    assert resumed["reused"] == left
    for key in ("prompts", "answered", "failed", "tokens"):
        assert resumed[key] == whole[key]


def test_a_finished_run_asks_nothing(prompts, toy, tokenizer, tmp_path):
    out = tmp_path / "a.jsonl"
    respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)
    before = out.read_bytes()
    asked = len(toy.batches)
    assert respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)["reused"] == 22
    assert len(toy.batches) == asked
    assert out.read_bytes() == before


def test_another_run_is_never_mixed_in(prompts, toy, tokenizer, make_tokenizer, chatml_template, tmp_path):
    out = tmp_path / "a.jsonl"
    respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)
    before = out.read_bytes()
    changes = {"target": "other", "sampling": {"temperature": 0.5}, "max_prompt_tokens": 99, "max_new_tokens": 8, "batch_size": 3,
               "seed": 6, "stop_token_ids": (1,), "template_options": {"x": 1}}
    assert changes.keys() == OPTIONS.__dataclass_fields__.keys()
    for name, value in changes.items():
        with pytest.raises(UserError, match=rf"a\.jsonl: was begun with other settings \({name}\): name another file"):
            respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=replace(OPTIONS, **{name: value}))
    with pytest.raises(UserError, match=r"other settings \(tokenizer\)"):
        respond(prompts, answer=toy, tokenizer=make_tokenizer(chatml_template + " "), out=out, options=OPTIONS)
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(UserError, match=r"other settings \(prompts_sha256\)"):
        respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)
    assert out.read_bytes() == before
    out.unlink()
    assert respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)["answered"] == 23
    (tmp_path / "a.jsonl.meta.json").unlink()
    with pytest.raises(UserError, match=r"a\.jsonl: exists, but a\.jsonl\.meta\.json"):
        respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)


def test_a_line_that_respond_did_not_write(prompts, toy, tokenizer, tmp_path):
    out = tmp_path / "a.jsonl"
    respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)
    lines = out.read_text().splitlines()
    for broken in ("{", "{}", "[]", '{"prompt_id": 1, "loss_mask": 3}'):
        out.write_text("\n".join([*lines[:2], broken, *lines[3:]]) + "\n")
        with pytest.raises(UserError, match=r"a\.jsonl:3: is not an answer that outrider respond wrote"):
            respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)


def test_prompts_that_cannot_be_answered_are_counted(write_jsonl, toy, tokenizer, tmp_path, capsys):
    path = write_jsonl({"prompt": "hi"}, {"prompt": ""}, {"prompt": "x" * 200}, {"messages": [{"role": "user", "content": " "}]})
    result = respond(path, answer=toy, tokenizer=tokenizer, out=tmp_path / "a.jsonl", options=OPTIONS)
    assert (result["prompts"], result["answered"], result["failed"]) == (4, 1, 3)
    said = capsys.readouterr().err
    assert f"not answered: {path}:2: prompt is empty" in said
    assert f"not answered: {path}:3: the prompt has " in said
    assert "max_prompt_tokens = 100" in said
    assert f"not answered: {path}:4: messages[0].content is empty" in said
    silent = respond(path, answer=lambda prompt_ids, *, seed: [[] for _ in prompt_ids], tokenizer=tokenizer,
                     out=tmp_path / "b.jsonl", options=OPTIONS)
    assert (silent["answered"], silent["failed"]) == (0, 4)
    assert f"{path}:1: the target produced no token" in capsys.readouterr().err


def test_a_broken_prompts_file_names_the_line(write_jsonl, toy, tokenizer, tmp_path):
    path = write_jsonl({"prompt": "hi"}, "{")
    with pytest.raises(UserError, match=r"conversations\.jsonl:2: broken JSON"):
        respond(path, answer=toy, tokenizer=tokenizer, out=tmp_path / "a.jsonl", options=OPTIONS)
    assert not (tmp_path / "a.jsonl").exists()


def test_a_disk_that_fills_up_is_one_sentence_and_what_was_written_stays(prompts, toy, tokenizer, tmp_path):
    out, kept = tmp_path / "a.jsonl", tmp_path / "kept.jsonl"

    def filling(prompt_ids, *, seed):
        if len(toy.batches) == 3:
            out.rename(kept)
            out.symlink_to("/dev/full")  # every write there fails as on a full disk
        return toy(prompt_ids, seed=seed)

    with pytest.raises(UserError, match=r"cannot write .*a\.jsonl: the disk is full"):
        respond(prompts, answer=filling, tokenizer=tokenizer, out=out, options=OPTIONS)
    kept.replace(out)
    assert len(records(out)) == 12
    assert respond(prompts, answer=toy, tokenizer=tokenizer, out=out, options=OPTIONS)["reused"] == 12


def test_a_folder_that_cannot_be_written(prompts, toy, tokenizer):
    with pytest.raises(UserError, match="a file is in the way of a folder"):
        respond(prompts, answer=toy, tokenizer=tokenizer, out=prompts / "deep" / "a.jsonl", options=OPTIONS)


@pytest.mark.parametrize("name", ["max_prompt_tokens", "max_new_tokens", "batch_size"])
def test_bad_options(name):
    with pytest.raises(UserError, match=f"{name} = 0: must be at least 1"):
        replace(OPTIONS, **{name: 0})
