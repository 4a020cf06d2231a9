"""How good is a head? Figures of held-out text while a model is trained, and of the target's own replies.

`Tally` is teacher-forced on text of any origin: bits per byte, and how many drafts would be accepted.

    python -m train.generate_data replies prompts.jsonl --model demo --temperature 1 --out replies.jsonl
    python -m train.evaluate demo replies.jsonl

reads replies that the target has written (`train.serving`) and says how many tokens a verify step emits in each mode of
serving, with an interval, beside what the engine that drew the replies has counted. Exit status 1: the engine's count
lies outside the interval, so that serving is not what was evaluated.

    python -m train.evaluate probe-contract demo replies.jsonl

feeds the head rightly and in wrong ways (`train.contract`) and says how often its first draft would be accepted. Exit
status 1: the right way does not win.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from mtp import weights
from mtp.draft_head import MTPHead
from mtp.kernels.sampling import Sampling
from mtp.shapes import Array, Bool
from train import contract, serving
from train.data import Batch, HeldOut
from train.head_data import Sequences
from train.losses import RowScores
from train.sequences import Sequence as Tokens
from train.serving import SAMPLED_MODES, Rounds


@dataclass(frozen=True)
class Acceptance:
    """Of the drafts at each depth, over the anchors whose whole chain lies in one document."""

    num_anchors: int
    # share of anchors whose drafts all held up to this depth
    unconditional: tuple[float, ...]

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """Given that the drafts before held; None where none did."""
        before = (1.0, *self.unconditional[:-1])
        return tuple(a / b if b else None for a, b in zip(self.unconditional, before, strict=True))

    @property
    def length(self) -> float:
        """Mean tokens a verify step: 1 plus the accepted drafts, every anchor weighted alike."""
        return 1.0 + sum(self.unconditional)


class Tally:
    """Sums over evaluated batches, by domain."""

    def __init__(self, held_out: HeldOut, num_depths: int) -> None:
        self.names = tuple(dict.fromkeys(held_out.domains))
        self._domain = np.array([self.names.index(name) for name in held_out.domains])
        # a document's bytes are shared out evenly to its predictions, so that a part of it has a part of them
        predictions = np.maximum(np.diff(held_out.corpus.starts) - 1, 1)
        self._bytes_each = held_out.num_bytes / predictions
        self._bytes = np.zeros(len(self.names))
        self._nll = np.zeros(len(self.names))
        self._anchors = np.zeros(len(self.names))
        # accepted at T = 0 and at T = 1
        self._accepted = np.zeros((2, len(self.names), num_depths))

    def add(self, batch: Batch, scores: RowScores, valid: Bool[Array, "B T R"]) -> None:
        """Adds a batch of `train.data.HeldOut.batches` and what `train.step.score_batch` says of it."""
        documents, valid = np.asarray(batch.documents), np.asarray(valid)
        trunk_nll, draft_nll = np.asarray(scores.trunk_nll), np.asarray(scores.draft_nll)
        document = np.maximum(documents, 0) // 2
        domain = self._domain[document]
        here = valid[..., 0]
        self._nll += np.bincount(domain[here], trunk_nll[here], len(self.names))
        self._bytes += np.bincount(domain[here], self._bytes_each[document[here]], len(self.names))

        depths = draft_nll.shape[-1]
        length = documents.shape[1]
        # back from the rows of the targets to those of the anchors
        at_anchor = lambda x, depth: np.roll(x, -depth, axis=1)  # noqa: E731
        index = np.arange(length)[None, :]
        complete = at_anchor(valid[..., depths], depths) & (index + depths < length)
        self._anchors += np.bincount(domain[complete], minlength=len(self.names))
        # at T = 1 a draft that is in the text was kept with probability min(1, q / p)
        kept = np.exp(np.minimum(trunk_nll[..., None] - draft_nll, 0.0))
        held = np.ones((2, *documents.shape))
        for depth in range(1, depths + 1):
            agree = at_anchor(np.asarray(scores.agree)[..., depth - 1], depth)
            overlap = at_anchor(np.asarray(scores.overlap)[..., depth - 1], depth)
            held[0] = held[0] * agree
            for law, accepted in enumerate((held[0], held[1] * overlap)):
                self._accepted[law, :, depth - 1] += np.bincount(domain[complete], accepted[complete], len(self.names))
            held[1] = held[1] * at_anchor(kept[..., depth - 1], depth)

    def report(self) -> Mapping[str, dict]:
        """Figures of each domain and of "all".

        `bits_per_byte` is the text's cost in bits (all tokens but a document's first, the one that ends it included)
        by its bytes. `acceptance` at temperature 0 counts drafts equal to the trunk's own best token; at 1 it is the
        acceptance of rejection sampling, exact where the text is like the trunk's own samples.
        """
        groups = {name: [i] for i, name in enumerate(self.names)} | {"all": list(range(len(self.names)))}
        report = {}
        for name, rows in groups.items():
            anchors = int(self._anchors[rows].sum())
            laws = {
                f"temperature_{law}": Acceptance(
                    anchors, tuple((self._accepted[law, rows].sum(0) / max(anchors, 1)).tolist())
                )
                for law in (0, 1)
            }
            report[name] = {
                "bits_per_byte": float(self._nll[rows].sum() / math.log(2) / max(self._bytes[rows].sum(), 1.0)),
                "bytes": round(self._bytes[rows].sum()),
                "num_anchors": anchors,
                "acceptance": {
                    key: {
                        "unconditional": list(value.unconditional),
                        "conditional": list(value.conditional),
                        "length": value.length,
                    }
                    for key, value in laws.items()
                },
            }
        return report


# -- replies of the target ---------------------------------------------------------------------------------------------

# Texts are padded to these lengths and their doubles, so that few shapes are compiled.
SHORTEST = 64


def _doubled(size: int) -> int:
    return SHORTEST << max(0, (-(-size // SHORTEST) - 1).bit_length())


@dataclass(frozen=True)
class Text:
    """One reply: what was read and what came of it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    # tokens that each verify step emitted
    steps: tuple[int, ...]
    domain: str

    @property
    def length_group(self) -> str:
        """By the tokens of prompt and reply."""
        size = len(self.prompt_token_ids) + len(self.token_ids)
        return f"up to {_doubled(size)} tokens"


def read_texts(path: Path) -> tuple[list[Text], dict[str, Any]]:
    """The replies of `train.generate_data replies`, and what they were drawn with.

    Raises:
        ValueError, OSError: one line; no such file, a line of another kind, or no reply with a token to draft.
    """
    about = json.loads(path.with_name(path.name + ".about.json").read_text(encoding="utf-8"))
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            prompt, tokens, steps = (tuple(record[name]) for name in ("prompt_token_ids", "token_ids", "steps"))
            texts.append(Text(prompt, tokens, steps, str(record.get("domain", "no domain"))))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path.name} line {number} is no reply of `train.generate_data replies`") from None
    # a reply of one token has no verify step
    texts = [text for text in texts if len(text.token_ids) > 1]
    if not texts:
        raise ValueError(f"{path.name} has no reply of two tokens or more: there is nothing to draft")
    return texts, about


def evaluate(loaded: weights.Loaded, texts: Sequence[Text], about: Mapping[str, Any], chunk_rows: int) -> dict:
    """What each mode would make of the texts: {mode: {group: figures}}; the group "all" comes first.

    Raises:
        ValueError: the checkpoint has no head.
    """
    head = _head_of(loaded)
    modes = ("greedy",) if about["temperature"] == 0 else SAMPLED_MODES
    vocab_size = loaded.config.vocab_size
    usable = jnp.arange(vocab_size) < about["usable_tokens"]
    sampling = replace(
        Sampling.alike(1, **{name: about[name] for name in ("temperature", "top_k", "top_p", "min_p")}),
        bias=jnp.where(usable, 0.0, -jnp.inf)[None].astype(jnp.float32),
    )
    rounds: dict[str, list[Rounds]] = {mode: [] for mode in modes}
    for text in tqdm(texts, desc="replies", unit="reply", leave=False, disable=not sys.stderr.isatty()):
        ids = (*text.prompt_token_ids, *text.token_ids)
        length = _doubled(len(ids))
        odds = serving.read_odds(
            head,
            loaded.model,
            *serving.padded(ids, length),
            sampling,
            num_depths=about["draft_tokens"],
            chunk_rows=min(chunk_rows, length),
        )
        odds = jax.tree.map(np.asarray, odds)
        for mode in modes:
            rounds[mode].append(serving.replay(odds, mode, len(text.prompt_token_ids), len(text.token_ids)))
    groups = {"all": list(range(len(texts)))}
    for names in ([text.domain for text in texts], [text.length_group for text in texts]):
        if len(set(names)) > 1:
            groups |= {name: [i for i, other in enumerate(names) if other == name] for name in sorted(set(names))}
    return {
        mode: {name: _figures([seen[i] for i in members]) for name, members in groups.items()}
        for mode, seen in rounds.items()
    }


def _head_of(loaded: weights.Loaded) -> MTPHead:
    if loaded.head is None:
        raise ValueError("the checkpoint has no mtp.* tensors: there is no head to evaluate")
    return loaded.head


def _figures(rounds: Sequence[Rounds]) -> dict[str, Any]:
    stands = serving.standing(rounds)
    low, high = serving.interval(rounds)
    before = (1.0, *stands[:-1])
    return {
        "num_replies": len(rounds),
        "num_tokens": sum(one.num_tokens for one in rounds),
        "expected_rounds": sum(one.num_rounds for one in rounds),
        "length": serving.serving_length(rounds),
        "interval": [low, high],
        # over all anchors, also those that serving seldom begins at
        "unconditional": list(stands),
        "conditional": [a / b if b else None for a, b in zip(stands, before, strict=True)],
        "draft_nll": list(serving.mean_nll(rounds)),
    }


def measured(texts: Sequence[Text]) -> float:
    """Tokens a verify step, as the engine that drew the replies counted them."""
    return sum(sum(text.steps) for text in texts) / sum(len(text.steps) for text in texts)


def show_serving(report: Mapping[str, Mapping[str, Any]], drawn: str, counted: float | None) -> None:
    """The figures as a table on stderr."""
    table = Table(title="tokens a verify step, and by depth: drafts that stand (% of all anchors), nats of the text")
    for column in ("mode", "replies", "length", "95 % interval", "measured", "stand, %", "nats"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, groups in report.items():
        for name, row in groups.items():
            table.add_row(
                mode if name == "all" else f"  {name}",
                f"{row['num_replies']:,}",
                f"{row['length']:.3f}",
                "{:.3f} to {:.3f}".format(*row["interval"]),
                f"{counted:.3f}" if counted is not None and mode == drawn and name == "all" else "",
                " ".join(f"{100 * x:.1f}" for x in row["unconditional"]),
                " ".join(f"{x:.2f}" for x in row["draft_nll"]),
            )
    Console(stderr=True, width=120).print(table)


def probe_contract(loaded: weights.Loaded, texts: Sequence[Text], chunk_rows: int) -> contract.Contract:
    """How often the head's first draft of each token of the replies would be accepted, by the way that it is fed.

    Raises:
        ValueError: the checkpoint has no head.
    """
    read = tuple(Tokens.reply(text.prompt_token_ids, text.token_ids) for text in texts)
    length = _doubled(max(len(one.tokens) for one in read))
    rows = list(Sequences(read, length).batches(1))
    batches = tqdm(rows, desc="rows", leave=False, disable=not sys.stderr.isatty())
    return contract.probe(_head_of(loaded), loaded.model, batches, min(chunk_rows, length))


def show_contract(figures: Mapping[str, Any]) -> None:
    """The readings as a table on stderr."""
    table = Table(
        title=f"first drafts by what the head is fed: {figures['drafts']:,} of {figures['sequences']:,} replies"
    )
    for column in ("fed", "overlap, %", "best agree, %", "behind, points", "standard error", "verdict"):
        table.add_column(column, justify="left" if column in ("fed", "verdict") else "right")
    for name, row in figures["readings"].items():
        numbers = [row[column] for column in ("overlap", "agree", "behind", "error")]
        table.add_row(name, *("" if x is None else f"{100 * x:.2f}" for x in numbers), row["verdict"])
    Console(stderr=True, width=120).print(table)


def _run_probe(args: argparse.Namespace, loaded: weights.Loaded, texts: Sequence[Text], about: Mapping) -> int:
    found = probe_contract(loaded, texts, args.chunk_rows)
    if not args.json:
        show_contract(found.figures())
    if found.complaint:
        print(found.complaint, file=sys.stderr)
    said = {"model": args.model, "contract": found.figures(), "winner": found.winner}
    print(json.dumps(said | {"passed": found.complaint is None, "drawn": about}))
    return int(found.complaint is not None)


def _run_evaluate(args: argparse.Namespace, loaded: weights.Loaded, texts: Sequence[Text], about: Mapping) -> int:
    # replies drawn without drafts have no count to compare with
    depths = about["draft_tokens"] or 3
    report = evaluate(loaded, texts, {**about, "draft_tokens": depths}, args.chunk_rows)
    drawn = "greedy" if about["temperature"] == 0 else about["verify"]
    counted = measured(texts) if about["draft_tokens"] else None
    show_serving(report, drawn, counted)
    low, high = report[drawn]["all"]["interval"]
    agrees = counted is None or low <= counted <= high
    if not agrees:
        print(
            f"the engine emitted {counted:.3f} tokens a verify step where {low:.3f} to {high:.3f} were expected: "
            "the head that served is not the one evaluated",
            file=sys.stderr,
        )
    print(json.dumps({"model": args.model, "modes": report, "measured": counted, "agrees": agrees, "drawn": about}))
    return int(not agrees)


PROBE = "probe-contract"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; a wrong file or setting is one line on stderr and exit status 2."""
    argv = sys.argv[1:] if argv is None else argv
    probes = argv[:1] == [PROBE]
    parser = argparse.ArgumentParser(
        prog=f"python -m train.evaluate{f' {PROBE}' * probes}",
        description="Does the head see the hidden rows it was trained on?" if probes else "How good is a head?",
        epilog=None if probes else f"`python -m train.evaluate {PROBE} --help`: does it see what it was trained on?",
    )
    parser.add_argument("model", help="checkpoint directory, hub id or demo")
    parser.add_argument("replies", type=Path, help="what `train.generate_data replies` wrote")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: what the replies were drawn in")
    parser.add_argument("--chunk-rows", type=int, default=64, help="rows whose laws are in memory at once (default 64)")
    if probes:
        parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args(argv[probes:])
    try:
        if args.chunk_rows < 1 or args.chunk_rows & (args.chunk_rows - 1):
            raise ValueError(f"--chunk-rows {args.chunk_rows} must be a power of two")
        texts, about = read_texts(args.replies)
        loaded = weights.load(args.model, dtype=args.dtype or about["dtype"])
        return (_run_probe if probes else _run_evaluate)(args, loaded, texts, about)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
