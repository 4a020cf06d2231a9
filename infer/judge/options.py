"""The options of `run`, and what they mean together. It imports nothing heavy, so that a mistyped option is answered
before anything is loaded.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from infer.judge.config import WORKLOADS

STAGES = ("memory", "texts", "equality", "replies")
ARMS = ("stock", "candidate")
RULES = ("strict", "reference")
# Begins the name of a model whose weights are drawn.
RANDOM = "random:"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Of `run`."""
    _add_common(parser)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default %(default)s")
    parser.add_argument("--passes", type=int, default=3, help="timed passes of each workload (default 3)")
    parser.add_argument(
        "--out", type=Path, help="where the record goes (default: the file of --append, or record.json)"
    )
    parser.add_argument("--report", type=Path, help="where the HTML page goes")
    parser.add_argument(
        "--append", type=Path, metavar="RECORD", help="add passes, and stages that it lacks, to this record"
    )
    parser.add_argument("--rule", choices=RULES, default="strict", help="how the record is judged (default strict)")
    parser.add_argument("--skip", default="", metavar="STAGE,...", help=f"any of {', '.join(STAGES)}")
    parser.add_argument("--self-test", action="store_true", help="run the negative controls as well")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of sampled replies (default: the config's)")
    parser.add_argument("--prompts", type=Path, help='JSONL of {"id", "prompt"} instead of the shipped prompts')
    parser.add_argument("--texts", type=Path, help='JSONL of {"id", "text"} instead of the shipped texts')
    parser.add_argument(
        "--acceptance",
        metavar="L,L,L",
        help="synthetic acceptance: drafts stand by chance, so many tokens a verify step in solo, team, busy",
    )


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Of `memory`, which `run` calls."""
    _add_common(parser)
    parser.add_argument("--arm", choices=ARMS, required=True)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="demo", help="checkpoint directory, hub id, demo (default), or random:CONFIG"
    )
    parser.add_argument("--config", type=Path, help="TOML file (default: the shipped one for this model and device)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="change a value of the config")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")


@dataclass(frozen=True)
class Options:
    """What `run` was asked for, checked."""

    workloads: tuple[str, ...]
    passes: int
    skip: frozenset[str]
    self_test: bool
    rule: str
    budget_seconds: float | None
    # of each workload; None for natural acceptance
    acceptance: tuple[float, ...] | None
    prompts: Path | None
    texts: Path | None


def read_options(args: argparse.Namespace) -> Options:
    """The options of `run`. Raises ValueError, one line, naming the wrong one."""
    names = tuple(part for part in args.workloads.split(",") if part)
    skip = frozenset(part for part in args.skip.split(",") if part)
    for option, given, known in (("--workloads", names, WORKLOADS), ("--skip", skip, STAGES)):
        wrong = [name for name in given if name not in known]
        if wrong:
            raise ValueError(f"{option} {wrong[0]!r} must be one of {', '.join(known)}")
    if not names or args.passes < (0 if args.append else 1):
        raise ValueError(f"--passes {args.passes} of {len(names)} workloads: both must be at least 1 (0 with --append)")
    acceptance = None if args.acceptance is None else _lengths(args.acceptance)
    if args.self_test and (acceptance is not None or args.model.startswith(RANDOM)):
        raise ValueError("--self-test needs natural acceptance and a trained model: its tests are of sampled tokens")
    for path in (args.out, args.report):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path} can't be written: {path.parent} is no directory")
    return Options(
        workloads=tuple(name for name in WORKLOADS if name in names),
        passes=args.passes,
        skip=skip,
        self_test=args.self_test,
        rule=args.rule,
        budget_seconds=args.budget,
        acceptance=acceptance,
        prompts=args.prompts,
        texts=args.texts,
    )


def _lengths(text: str) -> tuple[float, ...]:
    try:
        lengths = tuple(float(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if len(lengths) != len(WORKLOADS):
        raise ValueError(f"--acceptance {text!r} must be {len(WORKLOADS)} numbers, for {', '.join(WORKLOADS)}")
    return lengths
