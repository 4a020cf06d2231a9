"""Trains the draft head of a frozen model: on the model's own replies, best, or on conversations and texts.

    python -m train.generate_data replies prompts.jsonl --model demo --temperature 1 --out replies.jsonl
    python -m train.draft_head configs/train/head_demo.toml data.path=replies.jsonl --export runs/head/export
    python -m train.draft_head configs/train/head_demo.toml data.path=chats.jsonl data.learn_thinking=false --dry-run
    python -m train.draft_head configs/train/head_demo.toml loss.kind=e2e steps=500 --out runs/e2e
    python -m train.draft_head configs/train/head_demo.toml --resume

A head from the checkpoint is probed first: one that drafts better when it is fed wrongly is refused (`train.contract`).
The run's directory gets metrics.jsonl and the same figures for TensorBoard, the resolved config.json with hashes of
data, tokenizer and chat template, the newest checkpoints, and in `best` the one with the longest expected verify step
on held-out prompts, which is what `--export` writes. The last line on stdout is one JSON object.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtp import weights
from mtp.config import ModelConfig, load_toml
from mtp.draft_head import MTPHead
from mtp.model import Qwen35
from mtp.shapes import Array, Float32
from train.checkpoint import Checkpoints
from train.contract import Contract, probe
from train.head_data import HeadBatch, open_data
from train.head_step import HeadSettings, HeadState, Sums, head_step, head_sums
from train.hidden_cache import HiddenCache
from train.loop import Extent, Loop
from train.losses import HeadLoss
from train.metrics import Metrics, check_same, scalars
from train.pretrain import provenance
from train.sequences import DataSettings, Reader
from train.step import OptimizerSettings

# Bfloat16 operations a second of its matrix units, measured (`LOG.md`).
H200_OPERATIONS = 790e12
# Held-out sequences that a head is probed with before it is trained.
PROBED = 32
# Tokens of a sample that a dry run prints.
SHOWN = 200
INITS = ("checkpoint", "random")


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """Shape of a batch."""

    rows: int
    length: int  # tokens of a row; longer sequences are cut
    parts: int  # of a batch, one after the other, gradients added up
    devices: int  # that share the rows of a part


@dataclasses.dataclass(frozen=True)
class DraftHeadConfig:
    """A run; `configs/train/head_demo.toml` is the one to start from."""

    name: str
    model: str  # checkpoint directory, hub id or demo
    init: str  # of the head: "checkpoint" or "random"
    dtype: str  # of trunk and activations
    seed: int
    steps: int
    max_minutes: float  # for the steps alone; the schedule is cut to fit
    num_depths: int  # k, drafts that the head learns to make
    chunk_rows: int  # rows whose logits exist at a time
    teacher_ids: int  # tokens that the losses look at, those the model gives most to; 0 for all, which is exact
    remat: bool  # recompute each depth in the backward pass: slower, and less memory
    log_every: int
    eval_every: int  # steps; there is always one before the first and after the last
    save_minutes: float  # there is always one at the end
    wandb_project: str  # empty: none
    hidden_cache: str  # directory for the trunk's rows, so that only a first run has to run the trunk; empty: none
    data: DataSettings
    batch: RowSettings
    optimizer: OptimizerSettings
    loss: HeadLoss

    @property
    def settings(self) -> HeadSettings:
        """What the jitted step is specialised on."""
        return HeadSettings(
            optimizer=self.optimizer,
            loss=self.loss,
            num_depths=self.num_depths,
            chunk_rows=self.chunk_rows,
            teacher_ids=self.teacher_ids,
            remat=self.remat,
            devices=self.batch.devices,
        )

    def to_json(self) -> dict[str, Any]:
        """The resolved config as plain values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def check(self, model: ModelConfig) -> None:
        """Raises ValueError where two settings, or a setting and the model, contradict each other."""
        batch, longest = self.batch, model.max_position_embeddings
        shares = batch.parts * batch.devices
        part = batch.rows // max(shares, 1) * batch.length
        for wrong, message in (
            (self.init not in INITS, f"init={self.init!r} must be one of {', '.join(INITS)}"),
            (self.dtype not in ("bfloat16", "float32"), f"dtype={self.dtype!r} must be bfloat16 or float32"),
            (model.num_mtp_layers != 1, f"{self.model} has {model.num_mtp_layers} MTP layers; one is needed"),
            (batch.length > longest, f"batch.length={batch.length} exceeds the model's {longest}"),
            (
                min(batch.parts, batch.devices) < 1 or batch.rows % shares,
                f"batch.parts={batch.parts} times batch.devices={batch.devices} must divide {batch.rows=}",
            ),
            (
                batch.devices > len(jax.devices()),
                f"batch.devices={batch.devices}, and there are {len(jax.devices())} here",
            ),
            (
                self.chunk_rows < 1 or part % self.chunk_rows,
                f"chunk_rows={self.chunk_rows} must divide the {part} tokens of a part on a device",
            ),
            (
                self.teacher_ids and not part <= self.teacher_ids <= model.vocab_size,
                f"teacher_ids={self.teacher_ids} must be 0, or from the {part} tokens of a part on a device to the "
                f"model's {model.vocab_size}",
            ),
            (
                not 0 < self.data.held_out_fraction < 1,
                f"data.held_out_fraction={self.data.held_out_fraction} must be inside (0, 1)",
            ),
            (not 1 <= self.num_depths <= 8, f"num_depths={self.num_depths} must be from 1 to 8"),
            (self.steps < 1, f"steps={self.steps} must be at least 1"),
        ):
            if wrong:
                raise ValueError(message)


class Run:
    """A run under way: its directory, its data, the frozen model and the head's state."""

    def __init__(self, config: DraftHeadConfig, out: Path, resume: bool) -> None:
        directory = weights.resolve(config.model)
        model = ModelConfig.from_pretrained(directory)
        config.check(model)
        if not resume and out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty; add --resume to go on with that run, or give another --out")
        self.config, self.out = config, out
        self.reader = Reader.open(directory, model, config.data, config.batch.length)
        self.data = open_data(self.reader)
        # a resumed run must agree with all of it
        self.identity = config.to_json() | self.reader.hashes | {"data_sha256": self.data.sha256}
        loaded = weights.load(directory, dtype=config.dtype)
        self.loaded = dataclasses.replace(loaded, model=config.settings.place(loaded.model))
        if config.hidden_cache:
            about = self.reader.hashes | {"data_sha256": self.data.sha256, "length": config.batch.length}
            about |= {"model": config.model, "data": config.to_json()["data"]}
            cache = HiddenCache(Path(config.hidden_cache), about, config.batch.rows // config.batch.parts)
            self.data = cache.attach(self.data, self.loaded.model, Console(stderr=True))
        head = self.loaded.head
        if config.init == "random":
            head = MTPHead(self.loaded.config, nnx.Rngs(config.seed), jnp.float32)
        if head is None:
            raise ValueError(f"{config.model} has no mtp.* tensors: use init=random")
        # a random head reads nothing rightly yet, and a resumed one has been probed
        found = None if resume or config.init == "random" else self._probe(head)
        # placed, as a restored one is, so that both run the same compiled step
        self.state = config.settings.place(HeadState.start(head, config.settings))
        self.extent = Extent(config.steps)
        # held-out tokens a verify step of the best head so far, and its step
        self.best = (0.0, 0)
        out.mkdir(parents=True, exist_ok=True)
        self.metrics = Metrics(out, config.wandb_project, config.to_json())
        self.checkpoints = Checkpoints(out / "checkpoints")
        self.best_checkpoint = Checkpoints(out / "best", kept=1)
        if resume:
            self._resume()
        if found is not None:
            self.metrics.log({"step": 0, "contract": found.figures()})
        (out / "config.json").write_text(json.dumps(self.identity, indent=2) + "\n", encoding="utf-8")

    def _probe(self, head: MTPHead) -> Contract:
        """What the first held-out rows say of how the head is fed.

        Raises:
            ValueError: it clearly drafts better when it is fed wrongly.
        """
        batches = self.data.held_out.batches(self.config.batch.rows // self.config.batch.parts)
        found = probe(head, self.loaded.model, batches, self.config.chunk_rows, enough=PROBED)
        if found.winner is not None:
            raise ValueError(f"{self.config.model}: {found.complaint}")
        return found

    def _resume(self) -> None:
        self.state, run = self.checkpoints.restore(self.state)
        # a run may go on with more devices, or fewer
        ours, saved = ({**c, "batch": {**c["batch"], "devices": 0}} for c in (self.identity, run["config"]))
        check_same(ours, saved, self.out)
        self.best, self.extent = tuple(run["best"]), Extent(**run["extent"])
        self.metrics.forget_after(int(self.state.step))

    def save(self) -> None:
        """A checkpoint of this moment."""
        run = {"config": self.identity, "best": list(self.best), "extent": dataclasses.asdict(self.extent)}
        self.checkpoints.save(self.state, run)

    def batch(self, step: int) -> HeadBatch:
        """The training batch that follows `step` done ones."""
        shape = self.config.batch
        return self.config.settings.spread(self.data.train.batch(self.config.seed, step, shape.rows, shape.parts))

    def evaluate(self) -> dict[str, Any]:
        """Held-out figures of the head as it is; keeps it if it is the best so far."""
        config, sums = self.config, None
        for batch in self.data.held_out.batches(config.batch.rows // config.batch.parts):
            one = head_sums(self.state.head, self.loaded.model, config.settings.spread(batch), config.settings)
            sums = one if sums is None else jax.tree.map(jnp.add, sums, one)
        assert sums is not None
        figures = _plain(sums)
        step, length = int(self.state.step), figures["expected_length"]
        if length > self.best[0]:
            self.best = (length, step)
            if step != self.best_checkpoint.latest:
                self.best_checkpoint.save(self.state, {"held_out": figures})
        self.metrics.log({"step": step, "held_out": figures})
        return figures

    def step(self, batch: HeadBatch, learning_rate: Float32[Array, ""]) -> dict[str, Array]:
        """Starts a step; its figures."""
        self.state, figures = head_step(self.state, self.loaded.model, batch, learning_rate, self.config.settings)
        return figures

    def train(self) -> float:
        """Does the steps that are left; returns tokens a second, evaluations and saves not counted."""
        config, first = self.config, int(self.state.step)
        if first == 0:
            self.evaluate()
        tokens = config.batch.rows * config.batch.length
        return Loop(self, config, self.extent, self.metrics, tokens, first).run()

    def close(self) -> None:
        """Waits for what is still being written."""
        self.checkpoints.close()
        self.best_checkpoint.close()
        self.metrics.close()

    def trained(self) -> weights.Loaded:
        """The model with the best head, in the dtype that the model was loaded in."""
        state, _ = self.best_checkpoint.restore(self.state)
        dtype = self.loaded.model.embed_tokens.weight.dtype
        return dataclasses.replace(self.loaded, head=jax.tree.map(lambda x: x.astype(dtype), state.head))


def _plain(sums: Sums) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in sums.figures().items()}


def _coloured(reader: Reader, tokens: np.ndarray, learned: np.ndarray) -> Text:
    """Their text; whole runs are decoded, since a character may take several tokens."""
    text = Text()
    for own, run in itertools.groupby(zip(tokens, learned, strict=False), key=lambda one: bool(one[1])):
        text.append(reader.tokenizer.decode([int(token) for token, _ in run]), style="bold green" if own else "dim")
    return text


def flops_a_token(model: Qwen35, head: MTPHead, num_depths: int, teacher_ids: int) -> int:
    """Of matrix products in a step: the trunk forward, the head forward and twice that backward at each depth. What the
    backward pass computes again (logits, and all of it with `remat`) is not counted, nor is attention."""
    size = lambda module: sum(leaf.size for leaf in jax.tree.leaves(module) if leaf.ndim > 1)  # noqa: E731
    unembedding = model.config.vocab_size * model.config.hidden_size
    learned = teacher_ids * model.config.hidden_size or unembedding
    return 2 * (size(model.layers) + unembedding + num_depths * (3 * size(head) + 2 * learned))


def dry_run(run: Run, console: Console) -> dict[str, Any]:
    """Shapes, sizes, what became of the lines, and a row and a conversation as the model reads them, what is learned in
    colour; nothing is trained."""
    config, trunk, model = run.config, run.loaded.model, run.loaded.config
    batch = run.batch(0)
    count = sum(leaf.size for leaf in jax.tree.leaves(run.state.head))
    rows = config.batch.rows // config.batch.parts
    logits = config.chunk_rows * (config.num_depths + 1) * model.vocab_size * 4
    size = {
        "trained_parameters": count,
        # float32: parameters, two moments, a gradient
        "optimizer_gib": 16 * count / 2**30,
        "trunk_gib": sum(leaf.nbytes for leaf in jax.tree.leaves(trunk)) / 2**30,
        # p and q of a chunk's rows, and their exponentials
        "logits_gib": 2 * logits / 2**30,
    }
    size |= {
        # activations come on top
        "least_memory_gib": sum(value for name, value in size.items() if name.endswith("_gib")),
        "batch": list(batch.tokens.shape),
        "flops_a_token": flops_a_token(trunk, run.state.head, config.num_depths, config.teacher_ids),
        "learned_tokens": int(jnp.sum(batch.learned)),
        "training_sequences": len(run.data.train.sequences),
        "held_out_sequences": len(run.data.held_out.sequences),
        "data": dataclasses.asdict(run.data.counts),
        # on disk, if it is asked for
        "hidden_cache_gib": run.data.num_tokens * model.hidden_size * trunk.embed_tokens.weight.dtype.itemsize / 2**30,
    }
    if "H200" in jax.devices()[0].device_kind:
        size["tokens_per_second_at_most"] = config.batch.devices * H200_OPERATIONS / size["flops_a_token"]
    ids, learned = np.asarray(batch.tokens[0, 0]), np.asarray(batch.learned[0, 0])
    ids = ids[np.asarray(batch.documents[0, 0]) >= 0][:SHOWN]
    console.print(f"a part is {rows} rows of {config.batch.length} tokens; row 0 begins (learned tokens in green):")
    console.print(_coloured(run.reader, ids, learned))
    sequences = (*run.data.train.sequences, *run.data.held_out.sequences)
    chat = next((one for one in sequences if one.kind == "conversation"), None)
    if chat is not None:
        begin = max(0, int(chat.learned.argmax()) - SHOWN // 2)
        console.print("a conversation, around where the assistant begins:")
        console.print(_coloured(run.reader, chat.tokens[begin : begin + SHOWN], chat.learned[begin:]))
    table = Table(box=None, show_header=False)
    for name, value in scalars(size):
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if value % 1 else f"{value:,.0f}")
    console.print(table)
    return size


def main(argv: list[str] | None = None) -> int:
    """Runs the command; a wrong file or setting is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m train.draft_head", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a TOML of DraftHeadConfig")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings to replace")
    parser.add_argument("--out", type=Path, help="the run's directory (default: runs/NAME)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the model with the best head here")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--dry-run", action="store_true", help="show shapes, sizes and a sample, and stop")
    args = parser.parse_intermixed_args(argv)
    run = None
    try:
        config = load_toml(DraftHeadConfig, args.config, args.overrides)
        if args.print_config:
            print(json.dumps(config.to_json(), indent=2))
            return 0
        if args.export and args.export.exists() and any(args.export.iterdir()):
            raise ValueError(f"--export {args.export} exists and is not empty; give a new directory")
        if args.dry_run:
            # it leaves nothing behind
            with tempfile.TemporaryDirectory() as scratch:
                tried = Run(dataclasses.replace(config, hidden_cache=""), Path(scratch), resume=False)
                try:
                    print(json.dumps(dry_run(tried, Console(stderr=True)) | provenance()))
                finally:
                    tried.close()
            return 0
        run = Run(config, args.out or Path("runs") / config.name, args.resume)
        speed = run.train()
        if args.export:
            weights.export(run.trained(), args.export, like=config.model)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the newest checkpoint", file=sys.stderr)
        return 130
    finally:
        if run is not None:
            run.close()
    length, step = run.best
    said = {"name": config.name, "out": str(run.out), "steps": int(run.state.step), "tokens_per_second": speed}
    said |= {"best_step": step, "expected_length": length, "export": None if args.export is None else str(args.export)}
    said |= {"data": dataclasses.asdict(run.data.counts)}
    print(json.dumps(said | provenance()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
