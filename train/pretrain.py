"""Trains a trunk and its MTP head together, from scratch, on a tokenised corpus.

    python -m train.pretrain configs/train/demo.toml --export runs/demo/export
    python -m train.pretrain configs/train/demo.toml max_minutes=7 optimizer.learning_rate=1e-3 --out runs/slow
    python -m train.pretrain configs/train/demo.toml --resume

The run's directory gets metrics.jsonl and the same figures for TensorBoard, the resolved config.json and checkpoints;
`--export` writes the served checkpoint in bf16. The last line on stdout is one JSON object with the held-out figures.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from mtp import weights
from mtp.config import ModelConfig, load_toml
from mtp.shapes import Array, Float32
from train.checkpoint import Checkpoints
from train.data import Batch, Corpus, HeldOut, read_meta
from train.evaluate import Tally
from train.loop import Extent, Loop
from train.metrics import Metrics, check_same
from train.step import (
    ComputeSettings,
    LossSettings,
    OptimizerSettings,
    Params,
    StepSettings,
    eval_step,
    init_state,
    train_step,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Small enough for hosts that refuse large files.
SHARD_BYTES = 15_000_000


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """Shape of a batch, also of the held-out ones."""

    rows: int
    length: int  # tokens of a window


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """A run; `configs/train/demo.toml` is the one to start from."""

    name: str
    model: str  # a preset of configs/model, or "tiny"
    corpus: Path  # made by `train.generate_data corpus`
    tokenizer: Path  # its files go into the export
    seed: int
    steps: int
    max_minutes: float  # for the steps alone; the schedule is cut to fit
    log_every: int
    eval_every: int  # steps; there is always one at the end
    eval_batches: int  # held-out batches to use, spread evenly; 0 for all
    save_minutes: float  # there is always one at the end
    batch: BatchSettings
    optimizer: OptimizerSettings
    loss: LossSettings
    compute: ComputeSettings

    @property
    def step_settings(self) -> StepSettings:
        """What the jitted step is specialised on."""
        return StepSettings(self.optimizer, self.loss, self.compute)

    def to_json(self) -> dict[str, Any]:
        """The resolved config as plain values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def check(self, model: ModelConfig, vocab_size: int) -> None:
        """Raises ValueError where two settings, or a setting and the corpus, contradict each other."""
        tokens = self.batch.rows * self.batch.length
        chunk, longest = self.loss.chunk_rows, model.max_position_embeddings
        for wrong, message in (
            (model.vocab_size != vocab_size, f"{self.model} has {model.vocab_size=}, the corpus {vocab_size=}"),
            (self.batch.length > longest, f"batch.length={self.batch.length} exceeds the model's {longest}"),
            (tokens % chunk, f"loss.chunk_rows={chunk} must divide batch.rows * batch.length = {tokens}"),
            (self.compute.dtype not in ("bfloat16", "float32"), f"compute.dtype={self.compute.dtype!r}"),
            (self.compute.precision not in ("default", "highest"), f"{self.compute.precision=}"),
            (model.num_mtp_layers != 1, f"{self.model} has {model.num_mtp_layers=}, one is needed"),
            (self.steps < 1, f"steps={self.steps} must be at least 1"),
        ):
            if wrong:
                raise ValueError(message)


def model_config(name: str, vocab_size: int) -> ModelConfig:
    """The preset of this name; "tiny" takes the given vocabulary, whose last id ends its texts."""
    if name == "tiny":
        return ModelConfig.tiny(vocab_size=vocab_size, eos_token_ids=(vocab_size - 1,))
    return ModelConfig.preset(name)


class Run:
    """A run under way: its directory, its data and its state."""

    def __init__(self, config: PretrainConfig, out: Path, resume: bool) -> None:
        vocab_size = read_meta(config.corpus)["vocab_size"]
        self.model_config = model_config(config.model, vocab_size)
        config.check(self.model_config, vocab_size)
        if not resume and out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty; add --resume to go on with that run, or give another --out")
        self.config, self.out = config, out
        self.corpus = Corpus.open(config.corpus / "train.bin")
        self.held_out = HeldOut.open(config.corpus)
        # placed, as a restored one is, so that both run the same compiled step
        state = init_state(self.model_config, config.step_settings, config.seed)
        self.state = jax.device_put(state, jax.devices()[0])
        self.extent = Extent(config.steps)
        # of the last evaluation
        self.report: dict[str, Any] | None = None
        out.mkdir(parents=True, exist_ok=True)
        self.metrics = Metrics(out)
        self.checkpoints = Checkpoints(out / "checkpoints")
        if resume:
            self._resume()
        (out / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")

    def _resume(self) -> None:
        self.state, run = self.checkpoints.restore(self.state)
        check_same(self.config.to_json(), run["config"], self.out)
        self.extent = Extent(**run["extent"])
        self.metrics.forget_after(int(self.state.step))

    def save(self) -> None:
        """A checkpoint of this moment."""
        run = {"config": self.config.to_json(), "extent": dataclasses.asdict(self.extent)}
        self.checkpoints.save(self.state, run)

    def batch(self, step: int) -> Batch:
        """The batch that follows `step` done ones."""
        return self.corpus.batch(self.config.seed, step, self.config.batch.rows, self.config.batch.length)

    def step(self, batch: Batch, learning_rate: Float32[Array, ""]) -> dict[str, Array]:
        """Starts a step; its figures."""
        self.state, figures = train_step(self.state, batch, learning_rate, self.config.step_settings)
        return figures

    def train(self) -> float:
        """Does the steps that are left; returns tokens a second, evaluations and saves not counted."""
        config = self.config
        tokens = config.batch.rows * config.batch.length
        return Loop(self, config, self.extent, self.metrics, tokens, int(self.state.step)).run()

    def evaluate(self) -> dict[str, Any]:
        """Figures of every held-out document, by domain (see `train.evaluate.Tally.report`); they are logged."""
        config = self.config
        tally = Tally(self.held_out, config.loss.num_depths)
        batches = list(self.held_out.batches(config.batch.rows, config.batch.length))
        if 0 < config.eval_batches < len(batches):
            batches = [batches[i * len(batches) // config.eval_batches] for i in range(config.eval_batches)]
        for batch in tqdm(batches, desc="held-out text", unit="batch", leave=False):
            tally.add(batch, *eval_step(self.state.params, batch, config.loss, config.compute))
        self.report = dict(tally.report())
        self.metrics.log({"step": int(self.state.step), "held_out": self.report})
        return self.report

    def close(self) -> None:
        """Waits for what is still being written."""
        self.checkpoints.close()
        self.metrics.close()


def export(params: Params, config: ModelConfig, tokenizer: Path, directory: Path) -> None:
    """Writes the served checkpoint: bf16, the published names, and the tokenizer's files."""
    served = params.cast(jnp.dtype("bfloat16"))
    loaded = weights.Loaded(config, served.model, served.head)
    weights.export(loaded, directory, shard_bytes=SHARD_BYTES)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, directory / name)


def show(report: dict[str, Any]) -> None:
    """The held-out figures as a table."""
    table = Table(title="held-out text: accepted drafts by depth, % of anchors (% given the ones before)")
    for column in ("domain", "bits a byte", "T", "depth 1, 2, ...", "length"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for name, row in report.items():
        for temperature in (0, 1):
            law = row["acceptance"][f"temperature_{temperature}"]
            pairs = zip(law["unconditional"], law["conditional"], strict=True)
            table.add_row(
                *((name, f"{row['bits_per_byte']:.3f}") if temperature == 0 else ("", "")),
                str(temperature),
                "  ".join(f"{100 * a:.1f} ({100 * (c or 0.0):.1f})" for a, c in pairs),
                f"{law['length']:.2f}",
            )
    Console().print(table)


def provenance() -> dict[str, Any]:
    """Where a number comes from: device, versions and commit."""
    git = shutil.which("git")
    done = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True) if git else None
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "flax": flax.__version__, "python": sys.version.split()[0]},
        "commit": done.stdout.strip() if done and done.returncode == 0 else None,
    }


def start(args: argparse.Namespace, config: PretrainConfig) -> Run:
    """The run that the arguments ask for; whatever is wrong with them shows here, before any time is spent.

    Raises:
      ValueError, OSError: naming what is wrong.
    """
    if args.export and args.export.exists() and any(args.export.iterdir()):
        raise ValueError(f"--export {args.export} exists and is not empty; give a new directory")
    if args.export and not (config.tokenizer / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{config.tokenizer / 'tokenizer.json'} does not exist: --export needs it")
    return Run(config, args.out or Path("runs") / config.name, args.resume)


def finish(training: Run, directory: Path | None) -> dict[str, Any]:
    """Trains to the end, saves, evaluates and exports; returns the run's summary."""
    began = time.monotonic()
    config = training.config
    try:
        speed = training.train()
        report = training.report or training.evaluate()
    finally:
        training.close()
    state = training.state
    if directory is not None:
        export(state.params, training.model_config, config.tokenizer, directory)
    return {
        "name": config.name,
        "out": str(training.out),
        "export": None if directory is None else str(directory),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "steps": int(state.step),
        "tokens": int(state.step) * config.batch.rows * config.batch.length,
        "tokens_per_second": speed,
        "seconds": time.monotonic() - began,
        "held_out": report,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the command; a wrong file or setting is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m train.pretrain", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a TOML of PretrainConfig")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings to replace")
    parser.add_argument("--out", type=Path, help="the run's directory (default: runs/NAME)")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the trained checkpoint here")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_toml(PretrainConfig, args.config, args.overrides)
        if args.print_config:
            print(json.dumps(config.to_json(), indent=2))
            return 0
        training = start(args, config)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        summary = finish(training, args.export)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the newest checkpoint", file=sys.stderr)
        return 130
    show(summary["held_out"])
    print(json.dumps(summary | provenance()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
