"""Features on disk: the same bits back in any order, a stopped run goes on, damage and strangers are refused in one sentence."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import noise

from outrider.errors import UserError
from outrider.features.capture import FeatureSource
from outrider.features.store import FeatureStore, StoreInfo

INFO = StoreInfo(target="t", rows="r", precision="as_loaded, bfloat16, apart", dtype="bfloat16", layer_ids=(1, 3), hidden_size=32,
                 row_length=10, num_rows=4)


def values(seed: int) -> torch.Tensor:
    return noise(10, 64, seed=seed).to(torch.bfloat16)


def kept(store: FeatureStore, row: int) -> torch.Tensor:
    found = store.get(row, torch.bfloat16)
    assert found is not None
    return found


def test_rows_come_back_bit_for_bit_in_any_order(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, INFO)
    for row in (2, 0, 3):
        store.put(row, values(row))
    for row in (3, 0, 2):
        assert torch.equal(kept(store, row), values(row))
    assert store.get(1, torch.bfloat16) is None
    for file in tmp_path.glob("row-*"):
        assert INFO.row_bytes <= file.stat().st_size < INFO.row_bytes + 500


def test_a_later_process_goes_on(tmp_path: Path) -> None:
    FeatureStore(tmp_path, INFO).put(1, values(1))
    again = FeatureStore(tmp_path, INFO)
    assert again.need == 3 * INFO.row_bytes
    assert torch.equal(kept(again, 1), values(1))


def test_in_8_bits(tmp_path: Path) -> None:
    info = replace(INFO, dtype="fp8")
    store = FeatureStore(tmp_path, info)
    store.put(0, values(0) * 100)
    found, truth = kept(store, 0).float(), values(0).float() * 100
    assert 0.01 < float((found - truth).norm() / truth.norm()) < 0.04
    file = next(tmp_path.glob("row-*"))
    assert info.row_bytes == 10 * 64 + 10 * 2 * 4
    assert info.row_bytes <= file.stat().st_size < info.row_bytes + 500


@pytest.mark.parametrize(("change", "named"), [({"target": "u"}, "target"), ({"layer_ids": (1, 4)}, "layer_ids"),
                                               ({"precision": "fp8, bfloat16, packed"}, "precision"), ({"rows": "x"}, "rows")])
def test_features_of_something_else_are_refused(tmp_path: Path, change: dict[str, object], named: str) -> None:
    late = FeatureStore(tmp_path, replace(INFO, **change))  # type: ignore[arg-type]
    FeatureStore(tmp_path, INFO).put(0, values(0))
    with pytest.raises(UserError, match=f"holds features made for another {named}"):
        late.put(1, values(1))
    with pytest.raises(UserError, match=f"holds features made for another {named}: delete its store.json and all "):
        FeatureStore(tmp_path, replace(INFO, **change))  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_without_their_description_are_not_believed(tmp_path: Path) -> None:
    FeatureStore(tmp_path, INFO).put(0, values(0))
    (tmp_path / "store.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"no store\.json that says what they are of: delete .* all its row-\*"):
        FeatureStore(tmp_path, replace(INFO, layer_ids=(1, 4)))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["{", "[]", "\0"])
def test_a_damaged_description_does_not_ask_for_its_own_removal_alone(tmp_path: Path, text: str) -> None:
    FeatureStore(tmp_path, INFO).put(0, values(0))
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(UserError, match=r"delete its store\.json and all its row-\*\.safetensors together, or") as refused:
        FeatureStore(tmp_path, INFO)
    assert "make it again" not in str(refused.value)


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("name", ["tokens.bin", "deep/notes.txt", ".hidden"])
def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path, name: str, *, with_rows: bool) -> None:
    for file in (name, *(["row-00000000.safetensors"] if with_rows else [])):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"holds other files \({name.partition('/')[0]}\): name an empty or absent folder"):
        FeatureStore(tmp_path, INFO)
    assert contents(tmp_path) == before


def test_an_empty_folder_and_one_left_by_a_kill_are_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    FeatureStore(tmp_path / "empty", INFO)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".store.json.ab12.partial").touch()
    FeatureStore(tmp_path / "killed", INFO)


def test_a_disk_too_small_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 4 * INFO.row_bytes - 1))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"4 rows of .* MiB need .* GiB in .*, which has .* GiB free"):
        FeatureStore(tmp_path / "store", INFO)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damage_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    store = FeatureStore(tmp_path, INFO)
    store.put(0, values(0))
    file = next(tmp_path.glob("row-*"))
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes({"flip": bytes(content), "cut": bytes(content[:-40]), "empty": b""}[damage])
    assert store.get(0, torch.bfloat16) is None
    assert re.search(r"row-00000000\.safetensors: .*; renamed to row-00000000\.safetensors\.damaged", capfd.readouterr().err)
    store.put(0, values(0))
    assert torch.equal(kept(store, 0), values(0)), "it is made again"


def test_a_source_captures_each_row_once(tmp_path: Path) -> None:
    from families import family_target
    from toys import random_rows

    from outrider.features.capture import capture

    target, rows = family_target("llama"), random_rows([[7, 3], [10]], length=10, seed=0)
    info = replace(INFO, dtype="float32", num_rows=2)
    captured: list[int] = []

    def run(asked):  # type: ignore[no-untyped-def]
        captured.extend(asked.row_ids_B.tolist())
        return capture(target, asked, (1, 3))

    for _ in range(2):  # the second with a store opened anew
        source = FeatureSource(target, (1, 3), keep=FeatureStore(tmp_path, info), run=run)
        found = source.features(rows, torch.device("cpu")).values_BSF
        for b in range(2):
            alone = capture(target, type(rows)(*(getattr(rows, name)[b : b + 1] for name in rows.__dataclass_fields__)), (1, 3))
            assert torch.equal(found[b], alone.values_BSF[0])
    assert captured == [0, 1]
