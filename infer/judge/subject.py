"""What is judged: weights on the device, how their tokens are chosen, and the two arms as engines around them.

A subject is a checkpoint (directory, hub id, or "demo"), or `random:CONFIG`: weights drawn on the device for a preset
or a config.json, which can be timed and nothing else.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from infer.cli import read_text
from infer.engine import Engine
from infer.judge.options import RANDOM
from infer.judge.replies import Law
from infer.tokenizer import Tokenizer
from mtp import weights
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead
from mtp.model import Qwen35
from mtp.weights import Loaded


@dataclass(frozen=True)
class Subject:
    """A model under judgement."""

    name: str
    dtype: str
    loaded: Loaded
    # None for random weights
    tokenizer: Tokenizer | None
    # its default sampling
    law: Law

    @property
    def random(self) -> bool:
        """Whether its weights mean nothing."""
        return self.tokenizer is None

    def arm(self, arm: str) -> Loaded:
        """What an arm holds on the device: the stock arm has no head."""
        return self.loaded if arm == "candidate" else replace(self.loaded, head=None)


def load(name: str, dtype: str | None) -> Subject:
    """Loads a subject.

    Args:
        dtype: of the weights; None is float32 on a CPU and bfloat16 elsewhere.

    Raises:
        ValueError, OSError, mtp.weights.CheckpointError: one line; nothing there, no head, no tokenizer.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if name.startswith(RANDOM):
        config = config_of(name)
        head = MTPHead(config, nnx.Rngs(1), dtype)
        loaded = Loaded(config, Qwen35(config, nnx.Rngs(0), dtype).stack(), head)
        return Subject(name, dtype, loaded, None, Law({"temperature": 1.0}, config.eos_token_ids, config.vocab_size))
    directory = weights.resolve(name)
    config = ModelConfig.from_pretrained(directory)
    tokenizer = Tokenizer.from_pretrained(directory, config)
    loaded = weights.load(directory, dtype=dtype)
    if loaded.head is None:
        raise ValueError(f"{name} has no mtp.* tensors: there is no candidate to judge")
    loaded.model.stack()
    law = Law({"temperature": 1.0, **tokenizer.defaults}, tokenizer.stop_ids, len(tokenizer))
    return Subject(name, dtype, loaded, tokenizer, law)


@contextmanager
def engine_of(subject: Subject, arm: str, *, num_draft_tokens: int, **options: Any) -> Iterator[Engine]:
    """An engine of one arm, with nothing left over from another; its memory is free again afterwards."""
    engine = Engine(
        subject.arm(arm),
        None,
        num_draft_tokens=num_draft_tokens if arm == "candidate" else 0,
        usable_tokens=subject.law.usable_tokens,
        snapshot_memory=0,
        max_mask_states=1,
        **options,
    )
    try:
        yield engine
    finally:
        engine.close()


def config_of(name: str) -> ModelConfig:
    """The config of a subject, whose weights are not read. Raises as `load`."""
    if not name.startswith(RANDOM):
        return ModelConfig.from_pretrained(weights.resolve(name))
    name = name.removeprefix(RANDOM)
    path = Path(name)
    return ModelConfig.from_hf(json.loads(read_text(path))) if path.is_file() else ModelConfig.preset(name)
