"""The verb: an audit that adds up, a cache that no change slips past, an output that is whole or absent, clear refusals."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.data import prepare as prepare_room
from outrider.data.prepare import PrepareOptions, key_ingredients, prepare
from outrider.data.rows import load_rows
from outrider.errors import UserError
from outrider.files import digest

OPTIONS = PrepareOptions(vocab_size=300, row_length=64, supervise="all", on_bad_record="stop", max_unsupervised_share=0.1,
                         max_bad_share=0.5, stop_token_ids=(), template_options={})


def test_the_audit_adds_up_and_the_rows_hold_the_documents(write_jsonl, talk, tokenizer, tmp_path, capsys):
    path = write_jsonl(
        *[talk("u", "hi", "a", "ok")] * 3,
        '{"broken',
        talk("u", "hi"),
        {"input_ids": [1, 2, 3], "loss_mask": [False, False, False]},
        {"input_ids": [1, 2, 3], "loss_mask": [True, False, True]},
        {"input_ids": list(range(100, 170)), "loss_mask": [False] * 66 + [True] * 4},  # supervised only after the cut
        {"input_ids": list(range(100, 170)), "loss_mask": [False] * 2 + [True] * 68},
        {"input_ids": [1, 999], "loss_mask": [True, True]},
        talk("u", "hi", "a", "\nmerged", "u", "so", "a", "ok"),
    )
    result = prepare([path], tokenizer=tokenizer, out=tmp_path / "rows",
                     options=replace(OPTIONS, on_bad_record="drop", max_unsupervised_share=0.5))
    assert result["dropped"] == {"broken JSON": 1, "no assistant turn": 1, "nothing supervised": 1,
                                 "no two neighbouring supervised tokens": 1, "supervised tokens lost to clipping": 1,
                                 "token outside the vocabulary": 1}
    assert (result["documents_in"], result["documents_kept"]) == (11, 5)
    assert result["documents_in"] == result["documents_kept"] + sum(result["dropped"].values())
    assert result["unsupervised_turns"] == {"tokens merge over the boundary": 1}
    lines = [json.loads(line) for line in (tmp_path / "rows/dropped.jsonl").read_text().splitlines()]
    assert [(line["record"].removeprefix(f"{path}:").split(":")[0], line["reason"]) for line in lines] == [
        ("4", "broken JSON"), ("5", "no assistant turn"), ("6", "nothing supervised"),
        ("7", "no two neighbouring supervised tokens"), ("8", "supervised tokens lost to clipping"),
        ("10", "token outside the vocabulary")]
    prepared = load_rows(tmp_path / "rows")
    batch = prepared.batch(list(range(len(prepared))))
    real = batch.document_ids_BS >= 0
    assert result["rows"] == len(prepared)
    assert result["tokens"] == int(real.sum())
    assert result["supervised_tokens"] == int(batch.loss_mask_BS.sum())
    assert not batch.loss_mask_BS[~real].any()
    ends = real[:, :-1] & ~real[:, 1:]
    assert (ends.sum(1) <= 1).all()  # padding only at the end
    short = len(tokenizer.apply_chat_template(talk("u", "hi", "a", "ok")["messages"])["input_ids"])
    merged = len(tokenizer.apply_chat_template(talk("u", "hi", "a", "\nmerged", "u", "so", "a", "ok")["messages"])["input_ids"])
    clipped = 6 + 6 + max(merged - 64, 0)
    assert result["clipped_share"] == pytest.approx(clipped / (3 * short + 3 + 3 + 70 + 70 + merged))
    assert json.loads((tmp_path / "rows/rows.json").read_text())["audit"] == {
        key: value for key, value in result.items() if key not in ("folder", "reused")}
    assert prepared.contains_token(163)
    assert not prepared.contains_token(164)  # only in what was cut off
    assert not prepared.contains_token(299)
    assert result["mask_token_ids"]
    assert not any(prepared.contains_token(id) for id in result["mask_token_ids"])
    assert "5 of 11 documents kept; dropped: 1 broken JSON" in capsys.readouterr().err


def test_padding_token_is_not_counted_as_present(write_jsonl, tokenizer, tmp_path):
    path = write_jsonl({"input_ids": [5, 6], "loss_mask": [True, True]})
    prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    prepared = load_rows(tmp_path / "rows")
    assert prepared.batch([0]).input_ids_BS[0, -1] == 0
    assert not prepared.contains_token(0)
    assert prepared.contains_token(5)


@pytest.mark.parametrize("length", [2, 7, 8, 9, 63, 64])
def test_documents_of_every_length_come_back_whole(write_jsonl, tokenizer, tmp_path, length):
    documents = [list(range(start, start + length)) for start in range(100, 107)]
    path = write_jsonl(*[{"input_ids": ids, "loss_mask": [False] * (length - 2) + [True] * 2} for ids in documents])
    prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    prepared = load_rows(tmp_path / "rows")
    batch = prepared.batch(list(range(len(prepared))))
    found = []
    for row in range(len(prepared)):
        for document in range(int(batch.document_ids_BS[row].max()) + 1):
            here = batch.document_ids_BS[row] == document
            found.append(batch.input_ids_BS[row][here].tolist())
            assert torch.equal(batch.positions_BS[row][here], torch.arange(length))
            assert batch.loss_mask_BS[row][here].tolist() == [False] * (length - 2) + [True] * 2
    assert sorted(found) == documents


def test_stops_at_the_first_bad_record(write_jsonl, talk, tokenizer, tmp_path):
    path = write_jsonl(talk("u", "hi", "a", "ok"), talk("a", "ok", "u", "hi"))
    with pytest.raises(UserError) as caught:
        prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    assert str(caught.value).startswith(f"{path}:2: messages[0].role is 'assistant'")
    assert list(tmp_path.iterdir()) == [path]  # nothing half-written


def test_refuses_when_too_many_documents_teach_nothing(write_jsonl, talk, tokenizer, tmp_path):
    path = write_jsonl(*[talk("u", "hi", "a", "\nmerged")] * 3, *[talk("u", "hi", "a", "ok")] * 7)
    with pytest.raises(UserError, match=r"max_unsupervised_share = 0.1: 3 of 10 documents \(30%\) have nothing to learn "
                       r"\(3 nothing supervised; assistant turns left unsupervised: 3 tokens merge over the boundary\): "):
        prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    assert prepare([path], tokenizer=tokenizer, out=tmp_path / "rows",
                   options=replace(OPTIONS, max_unsupervised_share=0.3))["documents_kept"] == 7
    nothing = write_jsonl({"input_ids": [1, 2], "loss_mask": [0, 0]}, name="nothing.jsonl")
    with pytest.raises(UserError, match="none of 1 documents is left"):
        prepare([nothing], tokenizer=tokenizer, out=tmp_path / "rows", options=replace(OPTIONS, max_unsupervised_share=1.0))


@pytest.mark.parametrize(("change", "words"), [
    ({"row_length": 1}, "row_length = 1: must be at least 2"),
    ({"supervise": "first"}, "supervise = 'first': must be one of all, last"),
    ({"on_bad_record": "skip"}, "on_bad_record = 'skip': must be one of stop, drop"),
    ({"max_unsupervised_share": 1.5}, "max_unsupervised_share = 1.5: must lie in 0..1"),
    ({"max_bad_share": -0.1}, "max_bad_share = -0.1: must lie in 0..1")])
def test_bad_options(change, words):
    with pytest.raises(UserError, match=words):
        replace(OPTIONS, **change)


def test_reuses_rows_made_from_the_same_things_and_says_so(write_jsonl, talk, tokenizer, tmp_path, capsys):
    path = write_jsonl(talk("u", "hi", "a", "ok"))
    first = prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    written = (tmp_path / "rows/rows.parquet").stat().st_ino
    moved = path.rename(tmp_path / "moved.jsonl")
    again = prepare([moved], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    assert (tmp_path / "rows/rows.parquet").stat().st_ino == written
    assert (first["reused"], again["reused"]) == (False, True)
    assert {**first, "reused": True} == again
    assert "reused" in capsys.readouterr().err
    (tmp_path / "rows/rows.parquet").write_bytes(b"PAR1")
    mended = prepare([moved], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    assert mended == first
    assert "its checksum differs" in capsys.readouterr().err
    load_rows(tmp_path / "rows")
    assert (tmp_path / "rows.damaged" / "rows.parquet").read_bytes() == b"PAR1", "set aside, not lost"
    other = prepare([moved], tokenizer=tokenizer, out=tmp_path / "rows", options=replace(OPTIONS, row_length=128))
    assert not other["reused"]
    assert load_rows(tmp_path / "rows").row_length == 128


def test_every_ingredient_changes_the_key(write_jsonl, talk, make_tokenizer, chatml_template, tmp_path, monkeypatch):
    path, same = write_jsonl(talk("u", "hi", "a", "ok")), write_jsonl(talk("u", "hi", "a", "ok"), name="same.jsonl")
    tokenizer = make_tokenizer()

    def key(paths=(path,), tokenizer=tokenizer, options=OPTIONS):
        return digest(key_ingredients(paths, tokenizer=tokenizer, options=options))

    plain = key()
    assert key() == plain
    assert key([same]) == plain
    changes = {"vocab_size": 301, "row_length": 65, "supervise": "last", "on_bad_record": "drop", "max_unsupervised_share": 0.2,
               "max_bad_share": 0.2,
               "stop_token_ids": (1,), "template_options": {"enable_thinking": False}}
    assert changes.keys() == OPTIONS.__dataclass_fields__.keys()
    keys = {name: key(options=replace(OPTIONS, **{name: value})) for name, value in changes.items()}
    keys["bytes"] = key([write_jsonl(talk("u", "hi", "a", "ok!"), name="other.jsonl")])
    keys["twice"] = key([path, path])
    keys["template"] = key(tokenizer=make_tokenizer(chatml_template.replace("\n", " ")))
    keys["vocabulary"] = key(tokenizer=make_tokenizer(merges=(("a", "b"),)))
    keys["end token"] = key(tokenizer=make_tokenizer(eos="<|im_start|>"))
    monkeypatch.setattr(prepare_room, "version", lambda name: "0")
    keys["library"] = key()
    monkeypatch.undo()
    room = tmp_path / "room"
    room.mkdir()
    for source in Path(prepare_room.__file__).parent.glob("*.py"):
        (room / source.name).write_text(source.read_text())
    monkeypatch.setattr(prepare_room, "__file__", str(room / "prepare.py"))
    assert key() == plain
    for source in ("chat.py", "conversations.py", "packing.py", "rows.py", "prepare.py"):
        text = (room / source).read_text()
        (room / source).write_text(text + "\n")
        keys[source] = key()
        (room / source).write_text(text)
    assert plain not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_never_replaces_a_folder_that_prepare_did_not_write(write_jsonl, talk, tokenizer, tmp_path):
    path = write_jsonl(talk("u", "hi", "a", "ok"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"mine: holds thesis\.txt, which outrider prepare did not write"):
        prepare([path], tokenizer=tokenizer, out=tmp_path / "mine", options=OPTIONS)
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"
    with pytest.raises(UserError, match=r"conversations\.jsonl: is a file: name a folder"):
        prepare([path], tokenizer=tokenizer, out=path, options=OPTIONS)
    with pytest.raises(UserError, match=r"cannot write .*: a file is in the way of a folder"):
        prepare([path], tokenizer=tokenizer, out=path / "deep" / "rows", options=OPTIONS)
    (tmp_path / "empty").mkdir()
    prepare([path], tokenizer=tokenizer, out=tmp_path / "empty", options=OPTIONS)


@pytest.mark.parametrize("failing", ["write_rows_file", "write_json"])
@pytest.mark.parametrize(("failure", "seen"), [(OSError(errno.ENOSPC, "full"), UserError),
                                               (OSError(errno.EROFS, "read-only"), UserError),
                                               (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_failure_while_writing_leaves_the_old_rows_as_they_were(write_jsonl, talk, tokenizer, tmp_path, monkeypatch, failing,
                                                                 failure, seen):
    path = write_jsonl(talk("u", "hi", "a", "ok"))
    prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=OPTIONS)
    before = {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()}

    def fail(target, *_, **__):
        target.write_bytes(b"half")
        raise failure

    monkeypatch.setattr(prepare_room, failing, fail)
    with pytest.raises(seen) as caught:
        prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=replace(OPTIONS, row_length=128))
    if seen is UserError:
        assert f"cannot write {tmp_path / 'rows'}: " in str(caught.value)
    assert {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()} == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["conversations.jsonl", "rows"]


def test_the_same_files_give_the_same_bytes(write_jsonl, talk, tokenizer, tmp_path):
    path = write_jsonl(*[talk("u", "hi", "a", "ok" * count) for count in range(1, 20)])
    for name in ("one", "two"):
        prepare([path], tokenizer=tokenizer, out=tmp_path / name, options=OPTIONS)
    for name in ("rows.parquet", "rows.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_too_many_bad_records_stop_the_preparation(write_jsonl, talk, tokenizer, tmp_path):
    path = write_jsonl(*[talk("u", "hi", "a", "ok")] * 7, "{", "[1]", '{"x": 1}')
    options = replace(OPTIONS, on_bad_record="drop", max_bad_share=0.2)
    with pytest.raises(UserError, match=r"max_bad_share = 0.2: 3 of 10 records cannot be used \(1 broken JSON, 2 unknown form\), "
                                        r"the last of them .*:10: the record has the keys x") as refused:
        prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=options)
    assert "partial" not in str(refused.value)
    assert not (tmp_path / "rows").exists()
    assert prepare([path], tokenizer=tokenizer, out=tmp_path / "rows", options=replace(options, max_bad_share=0.3))["rows"]
