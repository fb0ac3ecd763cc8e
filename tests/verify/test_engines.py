"""A server's own counts, as differences; and every way in which a server can be the wrong one, broken, or gone."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_double import serving
from server_double import Engine

from outrider.config import parse_run
from outrider.errors import UserError
from outrider.verify.engines import open_engine, read_prometheus
from outrider.verify.sampling import DecodeOptions
from outrider.verify.served import Server, evaluate_server

NAMES = ("vllm", "sglang", "llamacpp")
PROMPTS = [[9, 5], [5], [11, 3, 3]]
GREEDY = DecodeOptions.greedy(max_new_tokens=16, stop_ids=(2,))


def measure(
    name: str, url: str, baseline: str | None = None, *, options: DecodeOptions = GREEDY, **changes: Any
) -> dict[str, Any]:
    server = Server(name, url, baseline, changes.pop("concurrency", 1))
    return evaluate_server(server, PROMPTS, options, **{"kinds": None, "grade": None, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_the_servers_own(name: str) -> None:
    with serving(Engine(name)) as url, serving(Engine(name, drafts=False)) as baseline:
        result = measure(name, url, baseline, concurrency=2)
    assert (result["forwards"], result["drafted"], result["accepted"]) == (11, 33, 11)  # 4 + 2 + 5, not the warm-up, not before
    assert result["tau"] == 2.0
    assert result["acceptance_rate"] == 11 / 33
    assert result["tokens"] == 25
    assert result["identical"] is True
    assert result["speedup"] == pytest.approx(result["tokens_per_s"] / result["baseline_tokens_per_s"])
    assert result["acceptance_by_slot"] == (None if name == "llamacpp" else [1.0, 0.0, 0.0])
    assert result["accuracy"] is None
    assert "by_kind" not in result
    assert set(result["conditions"]) >= {
        "engine", "base_url", "prompts", "temperature", "max_new_tokens", "baseline", "concurrency"}


@pytest.mark.parametrize("name", NAMES)
def test_kinds_and_right_answers_are_told_apart(name: str) -> None:
    """Kind by kind, from counters too; an answer is right here when it has 5 tokens, and prompt 2 has no right one."""
    with serving(Engine(name)) as url, serving(Engine(name, drafts=False)) as baseline:
        result = measure(name, url, baseline, kinds=["b", "a", "b"],
                         grade=lambda i, tokens: None if i == 2 else len(tokens) == 5)
    rows = result["by_kind"]
    assert [(kind, row["prompts"], row["tokens"], row["mean_answer_tokens"]) for kind, row in rows.items()] == [
        ("a", 1, 5, 5.0), ("b", 2, 20, 10.0)]
    assert result["tau_by_kind"] == {"a": 2.0, "b": 2.0}
    assert (rows["a"]["accuracy"], rows["b"]["accuracy"]) == (1.0, 0.0)
    assert result["accuracy"] == {"drafted": 0.5, "alone": 0.5}
    assert (result["forwards"], result["accepted"], result["tokens"]) == (11, 11, 25)
    assert result["identical"] is True, "answers are compared prompt by prompt, whatever the order"
    assert result["conditions"]["kinds"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", NAMES)
def test_without_a_baseline_nothing_is_compared(name: str) -> None:
    with serving(Engine(name)) as url:
        result = measure(name, f"{url}/v1/")
    assert [result[key] for key in ("speedup", "identical", "baseline_tokens_per_s", "first_difference")] == [None] * 4
    assert "none was named" in result["conditions"]["baseline"]


def test_another_text_is_found() -> None:
    with serving(Engine("vllm")) as url, serving(Engine("vllm", drafts=False, wrong=True)) as baseline:
        result = measure("vllm", url, baseline)
        sampled = measure("vllm", url, baseline, options=DecodeOptions(8, (2,), 1.0, 0.9, 5, 0))
    assert result["identical"] is False
    assert result["first_difference"] == {"prompt": 0, "position": 8, "speculative_token": 9, "target_token": 99, "gap": None,
                                          "resolution": None, "kind": "unknown"}
    assert sampled["identical"] is None


def answering(path: str, content: Any) -> Callable[[str, dict[str, Any] | None], tuple[int, bytes]]:
    """An engine that is right everywhere but at one path."""
    def reply(at: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        right = Engine({"/v1/completions": "vllm", "/metrics": "vllm", "/v1/models": "vllm", "/generate": "sglang",
                        "/completion": "llamacpp"}[path])
        if at != path:
            return right(at, body)
        if isinstance(content, tuple):
            return content
        return 200, content if isinstance(content, bytes) else json.dumps(content).encode()
    return reply


FAULTS: dict[str, tuple[str, str, Any, str]] = {
    "refused": ("vllm", "/v1/completions", (400, b'{"error": "prompt too long"}'), "status 400: .*prompt too long"),
    "no such path": ("sglang", "/generate", (404, b""), "status 404"),
    "crashed": ("llamacpp", "/completion", (500, b"\xff\xfe"), "status 500"),
    "died": ("llamacpp", "/completion", (0, b""), "cannot be reached or broke off"),
    "died, metrics": ("vllm", "/metrics", (0, b""), "cannot be reached or broke off"),
    "a web page": ("sglang", "/generate", b"<html>hello</html>", "answered with a web page"),
    "nothing": ("vllm", "/v1/completions", b"", "is not JSON"),
    "not text": ("vllm", "/v1/completions", b"\xff\xff", "is not text"),
    "a list": ("llamacpp", "/completion", [1, 2], "lacks 'tokens'"),
    "null": ("sglang", "/generate", None, "lacks 'output_ids'"),
    "a number": ("sglang", "/generate", 7, "lacks 'output_ids'"),
    "no models": ("vllm", "/v1/models", {"data": []}, r"lacks 'data\.0\.id'"),
    "a model without a name": ("vllm", "/v1/models", {"data": [{"id": 5}]}, "must be of type str"),
    "no choices": ("vllm", "/v1/completions", {"choices": []}, r"lacks 'choices\.0\.token_ids'"),
    "old vllm": ("vllm", "/v1/completions", {"choices": [{"text": "hi"}]}, "not older than"),
    "ids are null": ("vllm", "/v1/completions", {"choices": [{"token_ids": None}]}, "must be of type list"),
    "ids are words": ("sglang", "/generate", {"output_ids": ["a", "b"], "meta_info": {}}, "must be a list of token ids"),
    "ids are true": ("llamacpp", "/completion", {"tokens": [True], "timings": {}}, "must be a list of token ids"),
    "no speculation": ("sglang", "/generate", {"output_ids": [1, 2, 3], "meta_info": {}}, r"lacks 'meta_info.spec_verify_ct'"),
    "no speculation, llama.cpp": ("llamacpp", "/completion", {"tokens": [1, 2, 3], "timings": {"predicted_n": 3}},
                                  r"lacks 'timings.draft_n'"),
    "counts are floats": ("sglang", "/generate", {"output_ids": [1, 2], "meta_info": {
        "spec_verify_ct": 1.5, "spec_num_proposed_drafts": 3, "spec_num_correct_drafts": 1}}, "must be of type int"),
    "a histogram of words": ("sglang", "/generate", {"output_ids": [1, 2], "meta_info": {
        "spec_verify_ct": 1, "spec_num_proposed_drafts": 3, "spec_num_correct_drafts": 1,
        "spec_correct_drafts_histogram": ["none"]}}, "must be a list of counts"),
    "no counters": ("vllm", "/metrics", b"# nothing\n", "has no counter vllm:spec_decode_num_drafts"),
    "counters are nonsense": ("vllm", "/metrics", b"vllm:spec_decode_num_drafts_total{} many\n", "has no counter"),
    "another server's metrics": ("vllm", "/metrics", b"process_cpu_seconds_total 5\n", "has no counter"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_wrong_or_broken_is_one_sentence(fault: str) -> None:
    name, path, content, message = FAULTS[fault]
    with serving(answering(path, content)) as url, pytest.raises(UserError, match=message) as error:
        measure(name, url)
    assert str(error.value).startswith(url), "the sentence begins with the address"
    assert "\n" not in str(error.value)


def test_a_server_that_dies_midway() -> None:
    engine, left = Engine("sglang"), [2]

    def reply(path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        left[0] -= 1
        return engine(path, body) if left[0] >= 0 else (0, b"")

    with serving(reply) as url, pytest.raises(UserError, match="broke off"):
        measure("sglang", url)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "", "http:///x"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(UserError, match="must be the address of a server"):
        open_engine("vllm", url, drafts=True)


def test_nobody_listens() -> None:
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/v1/models: the server cannot be reached"):
        open_engine("vllm", "http://127.0.0.1:9", drafts=True)
    with pytest.raises(UserError, match="--engine tgi: must be one of vllm, sglang, llamacpp"):
        open_engine("tgi", "http://127.0.0.1:9", drafts=True)


def test_prometheus_text() -> None:
    found = read_prometheus('a_total{x="1",y="a\\"b,}"} 2\na_total{x="2"} 3e2\n# TYPE a counter\n'
                            'b 1.5 1700000000\nc nan\n\nd{ 3\n')
    assert found["a"] == {(("x", "1"), ("y", 'a\\"b,}')): 2.0, (("x", "2"),): 300.0}
    assert found["b"] == {(): 1.5}


@pytest.mark.parametrize("address", ["http://me:secret@127.0.0.1:8000/v1", "https://token-secret@host", "me:secret@host:1",
                                     "http://me:secret@127.0.0.1:notaport/"])
def test_an_address_with_a_password_is_refused_without_saying_it(address: str) -> None:
    """urllib's own error would say it: "nonnumeric port: 'secret@127.0.0.1:80'"."""
    with pytest.raises(UserError, match=r"--base-url [^@]*: must") as refused:
        measure("vllm", address)
    assert "secret" not in str(refused.value)
    with pytest.raises(UserError, match=r"features\.server = ") as refused:
        parse_run({"features": {"server": address}}, where="run.toml")
    assert "secret" not in str(refused.value)


def test_a_password_is_taken_from_netrc_and_neither_said_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logins: list[str | None] = []
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(Engine("vllm"), logins=logins) as address:
        measure("vllm", address)
        assert set(logins) == {None}, "there is no such file"
        (tmp_path / "netrc").write_text("machine other.host login you password other\n"
                                        "machine 127.0.0.1 login me password secret\n")
        logins.clear()
        assert "secret" not in json.dumps(measure("vllm", address))
        assert set(logins) == {"Basic " + base64.b64encode(b"me:secret").decode()}
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me\nsecret\n")
        with pytest.raises(UserError, match=r"netrc:\d+: cannot be understood") as refused:
            measure("vllm", address)
        assert "secret" not in str(refused.value)
