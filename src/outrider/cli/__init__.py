"""The verbs, in the order a user meets them: each a plain function that gives a dictionary, and a command of the same name."""

import functools
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider import show
from outrider.cli.training import train_here
from outrider.cli.turns import as_text, turns
from outrider.command import main as main
from outrider.command import verb
from outrider.config import DEVICE, DType, load_run
from outrider.errors import UserError
from outrider.files import check_out_file, only_writer

# torch and transformers take seconds to import and --help should not wait for them: the verbs import their rooms themselves.

Target = Annotated[str, typer.Option("--target", help="The target: a local folder or a hub id.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Precision = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Sample among the k likeliest; 0 is off.")]
TreeBudget = Annotated[int, typer.Option(help="Verify so many draft tokens at a time, as a tree; 0 is one chain.")]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let Python code in the target's folder run here.")]
Drafter = Annotated[Path, typer.Option("--drafter", help="An exported folder, a checkpoint, or a run.")]


@verb
def respond(
    prompts: Annotated[Path, typer.Argument(help='JSONL: {"prompt": ...} or {"messages": [...]} a line.')],
    target: Target,
    out: Annotated[Path, typer.Option(help="Where the conversations go (JSONL); an interrupted run goes on from it.")],
    max_new_tokens: Annotated[int, typer.Option(help="Token limit of an answer.")] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are counted as failed.")] = 4096,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    batch_size: Annotated[int, typer.Option(help="Prompts answered side by side.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    dtype: Precision = "bfloat16",
    device: Device = "cpu",
    trust_remote_code: TrustCode = False,
) -> dict[str, Any]:
    """Have the target answer prompts, for its drafter to learn from.

    Example: outrider respond prompts.jsonl --target ./my-model --out answers.jsonl
    """
    from outrider.data.respond import RespondOptions
    from outrider.data.respond import respond as run
    from outrider.features.target import load_target, load_tokenizer, target_digest
    from outrider.verify.sampling import DecodeOptions

    check_out_file(out, "--out")
    _trust(target, trust_remote_code)
    tokenizer = load_tokenizer(target)
    loaded = load_target(target, dtype=_dtype(dtype), device=_device(device), last_layer=None, head=True)
    stop_ids = tuple(loaded.stop_ids(tokenizer))
    DecodeOptions(max_new_tokens, stop_ids, temperature, top_p, top_k, seed)  # refuses what is out of range
    positions = loaded.facts.max_position_embeddings
    if max_new_tokens >= positions:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must leave room for a prompt in the target's {positions} "
                        "positions: lower it")
    options = RespondOptions(
        target=target_digest(target), sampling={"temperature": temperature, "top_p": top_p, "top_k": top_k, "dtype": dtype},
        max_prompt_tokens=min(max_prompt_tokens, positions - max_new_tokens),
        max_new_tokens=max_new_tokens, batch_size=batch_size, seed=seed,
        stop_token_ids=stop_ids, template_options={},
    )
    answer = functools.partial(
        loaded.answer, max_new_tokens=max_new_tokens, stop_ids=stop_ids, temperature=temperature, top_p=top_p, top_k=top_k
    )
    with only_writer(out):
        return run(prompts, answer=answer, tokenizer=tokenizer, out=out, options=options)


@verb
def prepare(
    conversations: Annotated[list[Path], typer.Argument(help="JSONL or Parquet files.")],
    target: Target,
    out: Annotated[Path, typer.Option(help="The folder of rows to write.")],
    row_length: Annotated[int, typer.Option(help="Tokens a row.")] = 8192,
    supervise: Annotated[str, typer.Option(help="Learn from 'all' assistant turns or the 'last'.")] = "all",
    on_bad_record: Annotated[str, typer.Option(help="'stop' at a record that cannot be used, or 'drop' and count it.")] = "stop",
    max_unsupervised_share: Annotated[float, typer.Option(help="Refuse when more of the documents have nothing to learn.")] = 0.5,
    max_bad_share: Annotated[float, typer.Option(help="With 'drop': stop when more of the records cannot be used.")] = 0.05,
    trust_remote_code: TrustCode = False,
) -> dict[str, Any]:
    """Turn conversations into rows of tokens with a loss mask. Counts what was kept, dropped and why.

    Example: outrider prepare answers.jsonl --target ./my-model --out rows --row-length 4096
    """
    from outrider.data.prepare import PrepareOptions
    from outrider.data.prepare import prepare as run
    from outrider.features.facts import read_facts
    from outrider.features.target import load_tokenizer, read_stop_ids

    _trust(target, trust_remote_code)
    facts, tokenizer = read_facts(target), load_tokenizer(target)
    options = PrepareOptions(
        vocab_size=facts.vocab_size, row_length=row_length, supervise=supervise, on_bad_record=on_bad_record,
        max_unsupervised_share=max_unsupervised_share, max_bad_share=max_bad_share,
        stop_token_ids=tuple(read_stop_ids(target, tokenizer)), template_options={},
    )
    with only_writer(out):
        return run(conversations, tokenizer=tokenizer, out=out, options=options)


@functools.partial(verb, display=show.show_plan)
def plan(
    run: Annotated[Path, typer.Argument(help="The run file (TOML); its rows need not be prepared yet.")],
    gpus: Annotated[str | None, typer.Option(help='Such as "4x rtx-pro-6000"; by default those found here.')] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the run file; repeatable.")] = None,
    placement: Annotated[str | None, typer.Option(help="Only colocated, pairs, fan-in or spread.")] = None,
    row_length: Annotated[int | None, typer.Option(help="Tokens a row; by default that of the prepared rows, else 8192.")] = None,
    suppose: Annotated[list[str] | None, typer.Option(
        help="What if it went wrong: unfused-attention, plain-logits or eager-mask; repeatable.")] = None,
    as_given: Annotated[bool, typer.Option("--as-given", help="No other settings where the run file's own do not fit.")] = False,
    calibrate: Annotated[Path | None, typer.Option(help="Measure the cards here (30 s), keep the rates in this file.")] = None,
    rates: Annotated[Path | None, typer.Option(help="Plan with rates that --calibrate kept in this file.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every line of every device.")] = False,
    simulate: Annotated[int | None, typer.Option(help="Time line and speed on so many GPUs, machines as --gpus has.")] = None,
    times: Annotated[Path | None, typer.Option(help="Measured stage times: a traced run, or a TOML or JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Draw the simulated time line: .html or .svg.")] = None,
) -> dict[str, Any]:
    """Say what a run needs on each GPU, what fits and how fast. Needs no GPU and no weights.

    Example: outrider plan run.toml --gpus "4x rtx-pro-6000"
    """
    from outrider.cli.outlook import Ahead, Cards, Wanted, plan_from

    wanted = Wanted(placement, row_length, suppose or (), vary=not as_given, explain=explain)
    return plan_from(run, settings or (), Cards(gpus, rates, calibrate), wanted, Ahead(simulate, times, page))


@verb
def train(
    run: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the run file; repeatable.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Cards of this machine to use: as many processes as they make.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes to start; on a CPU they sum over gloo.")] = None,
) -> dict[str, Any]:
    """Train a drafter as a run file says, or go on with it. Exactly, from its newest checkpoint.

    Under torchrun or srun it takes part with the other processes.

    Example: outrider train run.toml --gpus 4
    """
    from outrider.train.placement import process_count
    from outrider.train.processes import find_place, run_processes

    started = find_place(os.environ)
    count = process_count(load_run(run, settings or ()), gpus=gpus, processes=processes, started=started)
    if count > 1:
        return run_processes(count, train_here, (run, settings or ()))
    result = train_here(run, settings or ())
    if started is not None and started.rank > 0:
        sys.exit(0)  # the first process speaks for all
    return result


@functools.partial(verb, display=show.show_doctor)
def doctor(
    run_file: Annotated[Path | None, typer.Argument(help="A run file (TOML): what was found is told for this run.")] = None,
    record: Annotated[Path | None, typer.Option(help="out_of_memory.json, left by a run that ended in an out-of-memory.")] = None,
    log: Annotated[Path | None, typer.Option(help="What a run printed, a traceback at least; of any trainer.")] = None,
    run: Annotated[Path | None, typer.Option(help="With --log: the run file (TOML), for ledger lines and ways out.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the run file; repeatable.")] = None,
    row_length: Annotated[int | None, typer.Option(help="Tokens a row; by default that of the prepared rows, else 8192.")] = None,
) -> dict[str, Any]:
    """Say if this machine is sound for a run, or why memory ran out. With --record or --log, and which settings fit.

    Example: outrider doctor --log train.log --run run.toml
    """
    from outrider.cli.diagnosis import explain_log, explain_record, look_at_machine

    if run is not None and run_file is not None:
        raise UserError(f"--run {run}: {run_file} is named as the run file too: name one")
    given, changes = run or run_file, bool(settings) or row_length is not None
    if record is not None and (log is not None or given is not None or changes):
        raise UserError(f"--record {record}: it holds its run's settings: leave --log, --set, --row-length and the run file out")
    if changes and given is None:
        raise UserError("--set, --row-length: are over a run file, and none is named: name it, or leave them out")
    if record is not None:
        return explain_record(record)
    if log is not None:
        return explain_log(log, given, settings or (), row_length)
    return look_at_machine(given, settings or (), row_length)


@functools.partial(verb, display=show.show_evaluation)
def evaluate(
    prompts: Annotated[Path | None, typer.Argument(help='JSONL: {"prompt": ..} or {"messages": [..]}, "kind" optional.')] = None,
    target: Target = "",
    drafter: Annotated[Path | None, typer.Option("--drafter", help="An exported folder, a checkpoint, or a run.")] = None,
    prompt_set: Annotated[str | None, typer.Option(help="humaneval, gsm8k or mtbench instead of a file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Where the template has a switch.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token limit of an answer.")] = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    tree_budget: TreeBudget = 0,
    batch_size: Annotated[str, typer.Option(help="Prompts side by side; 1,8,32 measures the speed at each.")] = "1",
    execution: Annotated[str | None, typer.Option(help="eager, graph or compiled, both sides; compiled on CUDA.")] = None,
    rival: Annotated[list[str] | None, typer.Option(help="Another drafter folder, or 'lookup' (n-grams); repeatable.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the result as a page too: .html, .md or .json.")] = None,
    engine: Annotated[str | None, typer.Option(help="Measure a running server: vllm, sglang or llamacpp.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Of the server that drafts.")] = None,
    baseline_url: Annotated[str | None, typer.Option(help="Of the same server without a drafter.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests to the server at a time.")] = 1,
    dtype: Precision = "float32",
    device: Device = "cpu",
    trust_remote_code: TrustCode = False,
) -> dict[str, Any]:
    """Measure accepted length, speed-up, and that no text differs. Against the target alone, token for token.

    Example: outrider evaluate heldout.jsonl --target ./my-model --drafter runs/mine --batch-size 1,8
    """
    from outrider.cli.measuring import Here, There, check_questions, measure
    from outrider.data.questions import read_questions
    from outrider.features.target import load_tokenizer, read_stop_ids
    from outrider.verify.evaluate import parse_batch_sizes
    from outrider.verify.page import check_page, write_page
    from outrider.verify.sampling import DecodeOptions

    if not target:
        raise UserError("--target: is missing: name the target's folder or hub id")
    if page is not None:
        check_page(page)
    here = Here(parse_batch_sizes(batch_size), execution, tuple(rival or ()), _dtype(dtype), _device(device))
    _trust(target, trust_remote_code)
    tokenizer = load_tokenizer(target)
    questions = read_questions(prompts, prompt_set, tokenizer, limit=limit, thinking=thinking)
    options = DecodeOptions(max_new_tokens, tuple(read_stop_ids(target, tokenizer)), temperature, top_p, top_k, seed, tree_budget)
    check_questions(questions, options, target)
    result = measure(questions, options, target, drafter, here, There(engine, base_url, baseline_url, concurrency))
    result["conditions"]["thinking"] = thinking
    if page is not None:
        write_page(page, result)
    return result


@functools.partial(verb, display=lambda result: None)  # the text has been streamed already
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; with --chat the first turn, or left out.")] = None,
    target: Target = "",
    drafter: Annotated[Path | None, typer.Option("--drafter", help="An exported folder, a checkpoint, or a run.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Go on: each line of stdin is a turn, until it ends (Ctrl-D).")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer, left out of it; repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token limit of an answer.")] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    tree_budget: TreeBudget = 0,
    execution: Annotated[str | None, typer.Option(help="eager, graph or compiled; graph on CUDA.")] = None,
    dtype: Precision = "float32",
    device: Device = "cpu",
    trust_remote_code: TrustCode = False,
) -> dict[str, Any]:
    """Stream an answer, and say at the end how it came. On a terminal, what the drafter guessed right is green.

    Example: outrider generate "Name three rivers." --target ./my-model --drafter runs/mine
    """
    from outrider.cli.measuring import load_pair
    from outrider.data.chat import chat_format, render_prompt
    from outrider.data.prompts import PromptLine, prompt_ids
    from outrider.features.target import load_tokenizer, read_stop_ids
    from outrider.verify.execution import EAGER, GRAPH
    from outrider.verify.sampling import DecodeOptions
    from outrider.verify.stops import StopStrings
    from outrider.verify.stream import Writer

    if not target or drafter is None:
        raise UserError(f"{'--drafter' if target else '--target'}: is missing: name its folder")
    if prompt is None and not chat:
        raise UserError("prompt: is missing: say what to ask, or give --chat to ask turn by turn")
    _trust(target, trust_remote_code)
    tokenizer = load_tokenizer(target)
    template = chat_format(tokenizer, stop_token_ids=(), template_options={})
    first = None if prompt is None else prompt_ids(PromptLine("prompt", as_text(prompt), None, {}), template)
    if chat and not template.has_template:
        raise UserError("--chat: the target's tokenizer has no chat template, so turns cannot be told apart: leave --chat out")
    options = DecodeOptions(max_new_tokens, tuple(read_stop_ids(target, tokenizer)), temperature, top_p, top_k, seed, tree_budget)
    stops = StopStrings(tokenizer, tuple(stop)) if stop else None
    loaded, opened = load_pair(target, drafter, _dtype(dtype), _device(device))
    writer = Writer(loaded, opened, tokenizer, options, stops, execution or (GRAPH if loaded.device.type == "cuda" else EAGER),
                    sys.stdout.isatty())
    if chat:
        return writer.converse(lambda messages: render_prompt(tuple(messages), chat=template, where="chat"), turns(prompt))
    assert first is not None
    return writer.answer(first)


@verb
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder (its newest checkpoint) or a checkpoint.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    target: Annotated[str | None, typer.Option("--target", help="The target; by default the one it was trained for.")] = None,
    formats: Annotated[str, typer.Option("--format", help="hf, gguf (llama.cpp) or speculators; hf,gguf writes both.")] = "hf",
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")] = "bfloat16",
    golden: Annotated[bool, typer.Option("--golden", help="Load the target and add a golden vector to check engines.")] = False,
    trust_remote_code: TrustCode = False,
) -> dict[str, Any]:
    """Write the folder that servers load, check it, say how to serve.

    Example: outrider export runs/mine --out my-drafter --format hf,gguf
    """
    from outrider.weights.export import export as run

    if trust_remote_code and target is None:
        raise UserError("--trust-remote-code: whose code may run is for you to say, not for a checkpoint: name the target with "
                        "--target")
    _trust(target, trust_remote_code)
    return run(checkpoint, out, target, formats=formats.split(","), dtype=_dtype(dtype), golden=golden)


@verb
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default report.html in the run.")] = None,
) -> dict[str, Any]:
    """Draw a run on one HTML page. Curves, accepted length, times, memory, settings.

    Example: outrider report runs/mine
    """
    from outrider.report.run import report as make

    return make(run, out)


@functools.partial(verb, display=lambda result: None)  # it ends with its own table
def demo(
    folder: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("runs/demo"),
) -> dict[str, Any]:
    """The whole road on a small real model, on a CPU, in minutes.

    Example: outrider demo
    """
    from outrider.demo.run import demo as run

    return run(folder)


def _trust(target: str | None, asked: bool) -> None:
    from outrider.features.trust import trust_code

    if asked and target:
        trust_code(target)


def _dtype(name: str) -> str:
    if name not in DType.__args__:  # type: ignore[attr-defined]
        raise UserError(f"--dtype {name}: must be one of {', '.join(DType.__args__)}")  # type: ignore[attr-defined]
    return name


def _device(name: str) -> str:
    import torch

    if not DEVICE.fullmatch(name) or (name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count()):
        raise UserError(f"--device {name}: must be cpu, or cuda where a CUDA device is found ({torch.cuda.device_count()} here)")
    return name

