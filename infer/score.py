"""How probable is this text? The log-probability of each token after the first, plainly or through speculation.

    python -m infer.score --model demo --text "def read_lines(path):"
    python -m infer.score --model DIR --text-file story.txt --through verify
    python -m infer.score --model DIR --token-ids 1,2,3 --json

`plain` reads the text in one go, chunk by chunk. `verify` reads it as generation does: in windows of k + 1 rows, of
which a part is committed each time because the drafts behind it were made wrong on purpose. In float32 both agree to
2e-5. The last stdout line is one JSON object: `logprobs` (nats, one for each token after the first), `total`, `mean`,
and `bits_per_byte` over the bytes of those tokens (null for a checkpoint without a tokenizer).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.markup
import rich.table

from infer import batch, programs
from infer.cli import Parser, provenance, read_text, run_command, to_json
from infer.params import MAX_DRAFT_TOKENS, SamplingParams
from infer.tokenizer import Tokenizer
from mtp import weights
from mtp.config import ModelConfig
from mtp.weights import Loaded

THROUGH = ("plain", "verify")


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a text's tokens, in nats; the first token has none."""

    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Of the whole text behind its first token."""
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float:
        """Per token."""
        return self.total / len(self.logprobs)

    def bits_per_byte(self, num_bytes: int) -> float:
        """`num_bytes` is what the scored tokens stand for."""
        return -self.total / (math.log(2) * num_bytes)


def score(
    loaded: Loaded,
    token_ids: Sequence[int],
    *,
    through: str = "plain",
    num_draft_tokens: int = 3,
    chunk: int | None = None,
    seed: int = 0,
) -> Score:
    """Scores one text.

    Args:
        through: "plain" or "verify".
        num_draft_tokens: k. "plain" keeps the head primed if it is above 0 and there is a head; windows of "verify"
            have k + 1 rows.
        chunk: rows of a prefill chunk of "plain"; those of `infer.batch.CHUNK_LENGTHS` if None.
        seed: of "verify": which counts are committed, and the wrong drafts. All counts 1..k + 1 are equally likely.

    Raises:
        ValueError: one line; fewer than two tokens, more than the model's limit, or ids it does not have.
    """
    SamplingParams(num_draft_tokens=num_draft_tokens, seed=seed)
    check_tokens(token_ids, loaded.config)
    if through == "plain":
        return Score(tuple(_plain(loaded, token_ids, num_draft_tokens, chunk)))
    if through == "verify":
        return Score(tuple(_verify(loaded, token_ids, num_draft_tokens, seed)))
    raise ValueError(f"{through=} must be one of {', '.join(THROUGH)}")


def check_tokens(token_ids: Sequence[int], config: ModelConfig) -> None:
    """Raises ValueError (one line) if these can't be scored."""
    count, limit = len(token_ids), config.max_position_embeddings
    if count < 2:
        raise ValueError(f"the text has {count} token{'s' * (count != 1)}; the first has no score, so it needs two")
    if count > limit:
        raise ValueError(f"a text of {count} tokens exceeds the model's max_position_embeddings={limit}")
    wrong = [i for i in token_ids if not 0 <= i < config.vocab_size]
    if wrong:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {config.vocab_size}")


def _plain(loaded: Loaded, token_ids: Sequence[int], num_draft_tokens: int, chunk: int | None) -> list[float]:
    head = loaded.head if num_draft_tokens > 0 else None
    cache = batch.make_cache(
        loaded.config,
        head,
        lanes=1,
        tokens=len(token_ids),
        num_draft_tokens=num_draft_tokens,
        dtype=loaded.model.embed_tokens.weight.dtype,
    )
    found: list[float] = []
    inputs, targets = token_ids[:-1], token_ids[1:]
    for rows, count in batch.chunks([inputs], chunk):
        # what lies behind the last target is never read
        behind = np.zeros_like(rows)
        behind[0, : count[0]] = targets[len(found) : len(found) + count[0]]
        log_probs, cache = programs.score_chunk(
            loaded.model, head, cache, jnp.asarray(rows), jnp.asarray(count), jnp.asarray(behind)
        )
        found += np.asarray(log_probs)[0, : count[0]].tolist()
    return found


def _verify(loaded: Loaded, token_ids: Sequence[int], num_draft_tokens: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    cache = batch.make_cache(
        loaded.config,
        None,
        lanes=1,
        tokens=len(token_ids),
        num_draft_tokens=num_draft_tokens,
        dtype=loaded.model.embed_tokens.weight.dtype,
    )
    one = jnp.ones((1,), jnp.int32)
    log_probs, cache = programs.score_chunk(
        loaded.model, None, cache, one[None] * token_ids[0], one, one[None] * token_ids[1]
    )
    gen = programs.start_scoring(cache, one * token_ids[1], max_reply=1)
    # the target's own law: nothing filtered, no token forbidden
    own = SamplingParams(temperature=1.0, max_tokens=len(token_ids), num_draft_tokens=num_draft_tokens)
    request = batch.make_request([own], (), loaded.config.vocab_size)

    found = np.asarray(log_probs)[0].tolist()
    text = np.array([*token_ids, *[0] * num_draft_tokens], np.int32)
    place = 1
    while (left := len(token_ids) - 1 - place) > 0:
        num_drafts = min(num_draft_tokens, left - 1)
        committed = int(rng.integers(1, num_drafts + 2))
        targets = text[place + 1 : place + 2 + num_draft_tokens]
        drafts = targets[:num_draft_tokens].copy()
        # any token but the text's own
        behind = slice(committed - 1, None)
        wrong = rng.integers(1, loaded.config.vocab_size, len(drafts[behind]), dtype=np.int32)
        drafts[behind] = (drafts[behind] + wrong) % loaded.config.vocab_size
        log_probs, gen = programs.score_window(
            loaded.model,
            gen,
            request,
            jnp.asarray(drafts)[None],
            one * num_drafts,
            jnp.asarray(targets)[None],
            one * committed,
        )
        found += np.asarray(log_probs)[0, :committed].tolist()
        place += committed
    return found


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = Parser(
        prog="python -m infer.score", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="checkpoint directory, hub id, or demo (default)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="the text")
    source.add_argument("--text-file", type=Path, help="a UTF-8 file with the text")
    source.add_argument("--token-ids", metavar="1,2,3", help="its tokens; needs no tokenizer")
    parser.add_argument("--through", choices=THROUGH, default="plain", help="default plain")
    parser.add_argument(
        "--draft-tokens", type=int, default=3, help=f"k of --through verify, 0..{MAX_DRAFT_TOKENS} (default 3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the wrong drafts of --through verify (default 0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    return parser


def read_token_ids(text: str) -> list[int]:
    """Parses `1,2,3`. Raises ValueError, one line."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--token-ids {text!r} must be integers with commas between, such as 1,2,3") from None


def run(args: argparse.Namespace) -> int:
    """The command, from parsed options; returns the exit status."""
    SamplingParams(num_draft_tokens=args.draft_tokens, seed=args.seed)
    given = None if args.token_ids is None else read_token_ids(args.token_ids)
    text = args.text if args.text_file is None else read_text(args.text_file)
    if text == "":
        raise ValueError("the text is empty")

    directory = weights.resolve(args.model, args.revision)
    config = ModelConfig.from_pretrained(directory)
    tokenizer: Tokenizer | None = None
    if given is None or Tokenizer.exists(directory):
        tokenizer = Tokenizer.from_pretrained(directory, config)
    token_ids = tokenizer.encode(text) if given is None and tokenizer is not None else given or []
    check_tokens(token_ids, config)

    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    loaded = weights.load(directory, dtype=dtype)
    result = score(loaded, token_ids, through=args.through, num_draft_tokens=args.draft_tokens, seed=args.seed)
    num_bytes = None if tokenizer is None else tokenizer.num_bytes(token_ids[1:])
    record: dict[str, Any] = {
        "logprobs": result.logprobs,
        "total": result.total,
        "mean": result.mean,
        "bits_per_byte": result.bits_per_byte(num_bytes) if num_bytes else None,
        "token_ids": token_ids,
        "num_bytes": num_bytes,
        "through": args.through,
        "model": args.model,
        "dtype": dtype,
    }
    if not args.json:
        _show_table(token_ids, record, tokenizer)
    print(to_json(record | provenance()), flush=True)
    return 0


def _show_table(token_ids: Sequence[int], record: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    table = rich.table.Table(box=None, pad_edge=False)
    for title in ("token", "text", "log-probability"):
        table.add_column(title, justify="left" if title == "text" else "right")
    texts = ["" if tokenizer is None else json.dumps(tokenizer.decode([i]), ensure_ascii=False) for i in token_ids]
    for token, text, value in zip(token_ids[1:], texts[1:], record["logprobs"], strict=True):
        table.add_row(str(token), rich.markup.escape(text), f"{value:.4f}")
    console = rich.console.Console(stderr=True, highlight=False)
    console.print(table)
    bits = "" if record["bits_per_byte"] is None else f", {record['bits_per_byte']:.4f} bits per byte"
    console.print(f"total {record['total']:.4f}, mean {record['mean']:.4f}{bits}", markup=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0, 2 after an error, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
