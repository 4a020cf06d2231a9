"""Generates text: draft, verify, accept, commit, shown as it comes. With `--compare`: is anything lost, what is won?

    python -m infer.generate --model demo --prompt "def read_lines(path):" --compare
    python -m infer.generate --model demo --chat --no-thinking --prompt "Hello!" --max-new-tokens 64
    python -m infer.generate --model Qwen/Qwen3.5-27B --prompt-file story.txt --temperature 0.7 --verify coupled
    python -m infer.generate --model DIR --prompts in.jsonl --out out.jsonl

A prompt is continued greedily unless options say otherwise; with `--chat` the sampling defaults are those of the
checkpoint's generation_config.json. Text goes to stdout as it comes and a table to stderr. The last stdout line is one
JSON object:

    text, token_ids, finish_reason ("stop", "length" or "error"), error (null, or what went wrong), prompt_tokens,
    cached_tokens (prompt tokens that an earlier prompt's beginning spared), num_tokens, seed, sample_index, and how the
    reply was sampled
    num_verify_steps      passes of the target that emitted tokens (the first token is the prefill's)
    acceptance_length     tokens that verify steps emitted / verify steps
    accepted_by_position  of the drafts at each position of the window, the share that was accepted, null if none was
                          drafted there; `accepted` and `drafted` are the counts
    compile_seconds       compiling what is needed and running it once, before anything else; in no other figure
    time_to_first_token   seconds from getting a lane to the first token on the host; with --prompts the mean of all
                          replies, waiting for a lane not counted
    decode_seconds        from the first token of any reply to the end of the last one: with --prompts, prompts that get
                          their lane later are read meanwhile, and that time is in it
    tokens_per_second     tokens of verify steps over decode_seconds
    plain, equal, equal_expected, speedup, mismatch   with --compare: the same fields of plain decoding (the same engine
                          without drafts, k = 0, everything once more afterwards), whether both gave the same tokens,
                          whether they must (greedy, or the coupled law), and if they differ where, and by what margin
                          plain decoding had chosen there

A line of --prompts may have any field of `infer.params.SamplingParams` that JSON can write, penalties, "logit_bias":
{"id": value} and "num_draft_tokens": "auto" among them, but for `verify`. Its line of --out has `log_probs` (token,
log_prob, top) if it asked for "logprobs", and with "n" above 1 the further replies as `others`. With --compare the
lines come at the end, and no prompt's beginning is kept for the next.

Exit status: 0; 1 if texts that must be equal in float32 differ at more than a near-tie, or if a reply ended in an
error, which stderr names; 2 after an error that stopped everything; 130 after Ctrl-C.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.cli import Parser, provenance, read_text, run_command, to_json
from infer.params import LAWS, MAX_DRAFT_TOKENS, SamplingParams, Task
from infer.tokenizer import Tokenizer

DEFAULT_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Ask:
    """One prompt, and the sampling fields that are asked for by name."""

    # what to call it in an error message
    name: str
    # a text, or the messages of a conversation
    content: str | list[dict[str, Any]]
    fields: dict[str, Any]


def make_parser() -> argparse.ArgumentParser:
    """The options; those of `SamplingParams` are None unless given."""
    parser = Parser(
        prog="python -m infer.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="checkpoint directory, hub id, or demo (default)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt; without any of these three it is read from stdin")
    source.add_argument("--prompt-file", type=Path, help="a UTF-8 file with the prompt")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='many prompts: one {"prompt": ...} or {"messages": [...]} a line, with sampling fields if wanted '
        "(temperature, top_k, top_p, min_p, seed, max_tokens, min_tokens, stop, n, logprobs, logit_bias, ...)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="where the replies to --prompts go, in order")
    parser.add_argument("--lanes", type=int, default=8, help="prompts of --prompts that run at once (default 8)")
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says; uses the chat template")
    parser.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, help="with --chat; default: as the template says"
    )
    parser.add_argument("--max-new-tokens", type=int, dest="max_tokens", help="default 128")
    parser.add_argument(
        "--draft-tokens",
        type=_number_or_auto,
        dest="num_draft_tokens",
        help=f"k, drafts a step, 0..{MAX_DRAFT_TOKENS}; 0 is plain decoding, auto takes as many as pay, up to 3 "
        f"(default {DEFAULT_DRAFT_TOKENS}, or 0 without an MTP head)",
    )
    parser.add_argument(
        "--verify", choices=LAWS, help="law of acceptance (default rejection); all keep the target's law"
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default 0; with --chat the checkpoint's)")
    parser.add_argument("--top-k", type=int, help="0 is off (default off; with --chat the checkpoint's)")
    parser.add_argument("--top-p", type=float, help="1 is off (default off; with --chat the checkpoint's)")
    parser.add_argument("--min-p", type=float, help="0 is off (default off; with --chat the checkpoint's)")
    parser.add_argument("--seed", type=int, help="default 0")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="ends the reply; may be given several times")
    parser.add_argument("--compare", action="store_true", help="also decode plainly, and compare texts and speed")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    return parser


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer, or auto") from None


def asked_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields given on the command line, checked.

    Raises:
        ValueError: one line.
    """
    names = (field.name for field in dataclasses.fields(SamplingParams))
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    SamplingParams().with_fields(given)
    return given


def read_asks(args: argparse.Namespace, fields: dict[str, Any]) -> list[Ask]:
    """The prompts, from wherever they come.

    Raises:
        ValueError, OSError: one line; of a file of prompts it names the line.
    """
    if (args.prompts is None) != (args.out is None):
        raise ValueError("--prompts and --out go together")
    if args.lanes < 1:
        raise ValueError(f"--lanes {args.lanes} must be at least 1")
    if args.thinking is not None and not args.chat and args.prompts is None:
        raise ValueError("--thinking and --no-thinking need --chat")
    if args.compare and fields.get("num_draft_tokens") == 0:
        raise ValueError("--compare compares drafting with plain decoding: it needs --draft-tokens above 0")
    if args.prompts is not None:
        if not args.out.parent.is_dir():
            raise ValueError(f"--out {args.out}: there is no directory {args.out.parent}")
        return read_prompt_lines(args.prompts, args.chat, fields)
    if args.prompt is not None:
        text = args.prompt
    elif args.prompt_file is not None:
        text = read_text(args.prompt_file)
    elif sys.stdin is not None and not sys.stdin.isatty():
        text = sys.stdin.read()
    else:
        raise ValueError("there is no prompt: give --prompt or --prompt-file, or pipe text in")
    if not text:
        raise ValueError("the prompt is empty: it needs at least one token")
    return [Ask("", _said(text, args.chat), fields)]


def read_prompt_lines(path: Path, chat: bool, fields: dict[str, Any]) -> list[Ask]:
    """The prompts of a JSON Lines file; fields of a line go before `fields`."""
    asks = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        name = f"{path} line {number}: "
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}no JSON: {error}") from None
        if not isinstance(record, dict) or len({"prompt", "messages"} & record.keys()) != 1:
            raise ValueError(f'{name}it must be an object with either "prompt" or "messages"')
        own = {key: value for key, value in record.items() if key not in ("prompt", "messages")}
        if "verify" in own:
            raise ValueError(f"{name}verify is the same for all lines; give --verify")
        if "allowed" in own:
            raise ValueError(f"{name}allowed is a table that JSON can't write; give it to infer.engine in Python")
        try:
            SamplingParams().with_fields(fields | own)
        except ValueError as error:
            raise ValueError(name + str(error)) from None
        content = record.get("messages", record.get("prompt"))
        if "prompt" in record and not (isinstance(content, str) and content):
            raise ValueError(f"{name}prompt={content!r} must be a string that is not empty")
        if "messages" in record and not (isinstance(content, list) and content):
            raise ValueError(f"{name}messages={content!r} must be a list that is not empty")
        asks.append(Ask(name, _said(content, chat), fields | own))
    if not asks:
        raise ValueError(f"{path} has no prompts")
    return asks


def _said(content: str | list[dict[str, Any]], chat: bool) -> str | list[dict[str, Any]]:
    return [{"role": "user", "content": content}] if chat and isinstance(content, str) else content


def make_task(ask: Ask, tokenizer: Tokenizer, thinking: bool | None, num_draft_tokens: int) -> Task:
    """Renders and encodes a prompt. What is not asked for is the checkpoint's in a conversation, greedy for a text.

    Raises:
        ValueError: one line.
    """
    text, defaults = ask.content, {"num_draft_tokens": num_draft_tokens, "verify": LAWS[0]}
    try:
        if not isinstance(text, str):
            text = tokenizer.chat_prompt(text, thinking)
            defaults |= tokenizer.defaults
        return Task(tokenizer.encode(text), SamplingParams().with_fields(defaults | ask.fields))
    except ValueError as error:
        raise ValueError(ask.name + str(error)) from None


def show_table(result: dict[str, Any], dtype: str) -> None:
    """The figures for people, on stderr."""
    import rich.console
    import rich.table

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    plain = result.get("plain")
    table = rich.table.Table(box=None, pad_edge=False)
    for title in ("", "drafting", *(["plain"] if plain else [])):
        table.add_column(title, justify="right" if title else "left")
    columns = [result, *([plain] if plain else [])]
    for name, cell in (
        ("tokens", lambda r: str(r["num_tokens"])),
        ("verify steps", lambda r: str(r["num_verify_steps"])),
        ("acceptance length (tokens a step)", lambda r: number(r["acceptance_length"])),
        (
            "accepted by position",
            lambda r: " ".join(number(x) for x in r["accepted_by_position"] if x is not None) or "-",
        ),
        ("time to first token, ms", lambda r: number(1e3 * r["time_to_first_token"], 1)),
        ("tokens a second", lambda r: number(r["tokens_per_second"], 1)),
        ("compiling before that, s", lambda r: number(r["compile_seconds"], 1)),
    ):
        table.add_row(name, *(cell(column) for column in columns))
    console = rich.console.Console(stderr=True, highlight=False)
    console.print(table)
    if plain:
        console.print(verdict(result, dtype), markup=False)


def verdict(result: dict[str, Any], dtype: str) -> str:
    """One sentence on what `--compare` found."""
    speed = "" if result["speedup"] is None else f", {result['speedup']:.2f} times as fast as plain decoding"
    if result["equal"]:
        return f"The texts are equal{speed}."
    if not result["equal_expected"]:
        return (
            f"The texts differ, as they may: sampled with this law they follow the same distribution{speed}. "
            "--verify coupled, or temperature 0, gives plain decoding's own text."
        )
    mismatch = result.get("mismatch")
    if mismatch is None:
        return f"{result['num_equal']} of {result['num_replies']} texts are equal{speed}; the others say where not."
    where = (
        f"The texts differ from token {mismatch['position']} on, where the margin was {mismatch['margin']:.2g}{speed}"
    )
    if mismatch["near_tie"]:
        return f"{where}: a near-tie, which rounding decides."
    if dtype != "float32":
        return (
            f"{where}. {dtype} rounds a window's rows unlike a single row's; equality is promised with --dtype float32."
        )
    return f"{where}. This is no near-tie: something is wrong."


def run(args: argparse.Namespace) -> int:
    """The command, from parsed options; returns the exit status."""
    fields = asked_fields(args)
    asks = read_asks(args, fields)

    # From here on it takes seconds: jax, transformers, the checkpoint.
    import jax
    import jax.numpy as jnp

    from infer.batch import check_request
    from infer.compare import engine_for, run_tasks
    from mtp import weights
    from mtp.config import ModelConfig

    directory = weights.resolve(args.model, args.revision)
    config = ModelConfig.from_pretrained(directory)
    tokenizer = Tokenizer.from_pretrained(directory, config)
    has_head = "mtp" in weights.inspect(directory)["parts"]
    tasks = [make_task(ask, tokenizer, args.thinking, DEFAULT_DRAFT_TOKENS * has_head) for ask in asks]
    for ask, task in zip(asks, tasks, strict=True):
        try:
            check_request(task.token_ids, task.params, config)
            if not has_head and (task.params.num_draft_tokens != 0 or args.compare):
                raise ValueError(f"{args.model} has no mtp.* tensors, so it can't draft: use --draft-tokens 0")
        except ValueError as error:
            raise ValueError(ask.name + str(error)) from None

    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    loaded = _load(directory, jnp.dtype(dtype))
    loaded.model.stack()
    if not has_head and not args.json:
        print(f"{args.model} has no MTP head: plain decoding", file=sys.stderr)
    about = {"model": args.model, "dtype": dtype} | provenance()
    alone = args.prompts is None
    # Where nothing can use a prompt's beginning again, or must not so that plain decoding reads as much, none is kept.
    unshared = {"snapshot_memory": 0} if alone or args.compare else {}
    engine = engine_for(loaded, tokenizer, tasks, max_lanes=1 if alone else args.lanes, **unshared)
    names = [ask.name for ask in asks]
    run_all = functools.partial(run_tasks, engine, tasks, names=names, compare=args.compare)
    result, outcome = _run_one(args, run_all, tasks[0]) if alone else _run_many(args, run_all, tasks)
    for error in outcome.errors:
        print(f"error: {error}", file=sys.stderr)
    if not args.json:
        show_table(result, dtype)
    print(to_json(result | about), flush=True)
    return int(outcome.broken or bool(outcome.errors))


def _load(directory: Path, dtype: Any) -> Any:
    import rich.console
    import rich.progress

    from mtp import weights

    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the model", total=None)
        return weights.load(
            directory, dtype=dtype, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _run_one(args: argparse.Namespace, run_all: Callable[..., Any], task: Task) -> tuple[dict[str, Any], Any]:
    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    try:
        outcome = run_all(show=None if args.json else show)
    finally:
        if not args.json:
            print(flush=True)
    result = outcome.records[0] | outcome.total
    if args.compare:
        result["plain"] = outcome.records[0]["plain"] | outcome.total["plain"]
    names = ("temperature", "top_k", "top_p", "min_p", "verify", "num_draft_tokens")
    return result | {name: getattr(task.params, name) for name in names}, outcome


def _run_many(args: argparse.Namespace, run_all: Callable[..., Any], tasks: list[Task]) -> tuple[dict[str, Any], Any]:
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    with (
        args.out.open("w", encoding="utf-8") as out,
        rich.progress.Progress(console=console, transient=True, disable=args.json or not console.is_terminal) as bar,
    ):
        progress = bar.add_task("prompts", total=len(tasks))

        def done(record: dict[str, Any]) -> None:
            print(to_json(record), file=out, flush=True)
            bar.advance(progress)

        outcome = run_all(done=done)
    seeds = sorted({task.params.seed for task in tasks})
    about = {
        "num_prompts": len(tasks),
        "num_replies": sum(task.params.n for task in tasks),
        "out": str(args.out),
        "seed": seeds[0] if len(seeds) == 1 else seeds,
    }
    return about | outcome.total, outcome


def main(argv: list[str] | None = None) -> int:
    """Runs the command; see the module for its exit status."""
    args = make_parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
