"""How fast is speculation, and has it cost anything? Judges a record, and says it with an exit status.

    python -m infer.judge run --model demo --rule reference --out record.json --report report.html
    python -m infer.judge run --model demo --workloads busy --passes 1 --append record.json
    python -m infer.judge score record.json
    python -m infer.judge score record.json --rule reference
    python -m infer.judge report record.json --out report.html

`run` measures both arms, writes the record and judges it; the sample's cost is announced before it is drawn. `score`
computes every figure and verdict anew from what was counted and timed. Tables go to stderr; the last stdout
line is one JSON object with `specscore`, `passed` and `checks`. Exit status: 0 passed, 1 a gate failed or is undecided
(the reason names it), 2 the record is malformed or an option is wrong.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.cli import Parser, run_command, to_json
from infer.judge import options

STYLES = {"pass": "green", "fail": "red", "undecided": "yellow", "n-a": "dim"}


@dataclass(frozen=True)
class Command:
    """A sub-command: its options, and what it does with them; its heavy imports are its own."""

    # None for one that is not shown
    help: str | None
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_score_options(parser: argparse.ArgumentParser) -> None:
    """Of `score`."""
    parser.add_argument("record", type=Path, help="a record, of this judge or with the reference's fields")
    parser.add_argument(
        "--rule",
        choices=("strict", "reference"),
        default="strict",
        help="strict (default): intervals lie inside the bounds; reference: none lies wholly outside",
    )


def run_score(args: argparse.Namespace) -> int:
    """The command `score`; returns the exit status."""
    from infer.judge import gates, record

    found = record.load(args.record)
    return _conclude(found, gates.judge(found, args.rule), args.rule)


def _run(args: argparse.Namespace) -> int:
    from infer.judge import run

    found, verdict = run.run(args)
    return _conclude(found, verdict, args.rule)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Of `report`."""
    add_score_options(parser)
    parser.add_argument("--out", type=Path, help="HTML file to write (default: the record's name with .html)")


def run_report(args: argparse.Namespace) -> int:
    """The command `report`: writes the page and judges the record like `score`."""
    from infer.judge import gates, record, report

    found = record.load(args.record)
    verdict = gates.judge(found, args.rule)
    out = args.out or args.record.with_suffix(".html")
    out.write_text(report.page(found, verdict.checks, args.rule), encoding="utf-8")
    print(f"{out}: {out.stat().st_size:,} bytes", file=sys.stderr)
    return _conclude(found, verdict, args.rule)


def _run_memory(args: argparse.Namespace) -> int:
    from infer.judge import run

    print(to_json(run.run_memory(args)), flush=True)
    return 0


def _conclude(found: dict[str, Any], verdict: Any, rule: str) -> int:
    """The tables, the JSON line and the exit status."""
    _show(found, verdict)
    checks = {
        check.name: {k: v for k, v in dataclasses.asdict(check).items() if k != "name"} for check in verdict.checks
    }
    line = {
        "specscore": verdict.specscore,
        "passed": verdict.passed,
        "checks": checks,
        "rule": rule,
        "reason": verdict.reason,
        "synthetic_acceptance": found.get("synthetic_acceptance"),
    }
    print(to_json(line), flush=True)
    return 0 if verdict.passed else 1


def _show(record: dict[str, Any], verdict: Any) -> None:
    import rich.console
    import rich.markup
    import rich.table

    console = rich.console.Console(stderr=True, highlight=False)
    if record.get("synthetic_acceptance"):
        console.print("[yellow]synthetic acceptance: speed only, drafts stood by chance[/]")
    checks = rich.table.Table(box=None, pad_edge=False)
    for title in ("check", "measured", "limit", "verdict", "reason"):
        checks.add_column(title, justify="right" if title == "measured" else "left")
    for check in verdict.checks:
        word = f"[{STYLES[check.verdict]}]{check.verdict}[/]"
        checks.add_row(check.name, _short(check.measured), check.limit, word, rich.markup.escape(check.reason))
    workloads = rich.table.Table(box=None, pad_edge=False)
    for title in ("workload", "tokens a verify step", "speed-up", "passes"):
        workloads.add_column(title, justify="left" if title in ("workload", "passes") else "right")
    for name, found in record["ratios"].items():
        length = (record["acceptance"] or {}).get(name)
        passes = "  ".join(f"{one:.3f}" for one in found["passes"])
        workloads.add_row(name, "-" if length is None else f"{length:.3f}", f"{found['ratio']:.3f}", passes)
    console.print(checks)
    console.print()
    console.print(workloads)
    score = "-" if verdict.specscore is None else f"{verdict.specscore:.4f}"
    console.print(f"\nSpecScore {score}, {'passed' if verdict.passed else 'not passed'}")


def _short(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,.1f}" if figure >= 1000 else f"{figure:.5g}"


COMMANDS = {
    "run": Command("measure both arms, write the record and judge it", options.add_run_options, _run),
    # what `run` starts for each arm
    "memory": Command(None, options.add_memory_options, _run_memory),
    "score": Command("judge a record anew from its raw figures", add_score_options, run_score),
    "report": Command("write a record as one HTML page, and judge it", add_report_options, run_report),
}


def make_parser() -> argparse.ArgumentParser:
    """The options of all sub-commands."""
    parser = Parser(
        prog="python -m infer.judge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, command in COMMANDS.items():
        shown: dict[str, Any] = {} if command.help is None else {"help": command.help}
        command.add_options(choices.add_parser(name, description=command.help, **shown))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a sub-command; its own exit status, 2 after an error, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    return run_command(lambda: COMMANDS[args.command].run(args))


if __name__ == "__main__":
    sys.exit(main())
