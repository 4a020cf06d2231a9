"""Engines around a two-layer model whose head is right about half the time; they share compiled programs."""

from functools import cache
from typing import Any

import numpy as np

from infer.engine import Engine
from infer.params import SamplingParams
from infer.replies import Reply
from mtp import weights
from tests.infer import small_models

CONFIG = small_models.config(vocab_size=512, eos_token_ids=(511,))
# Its embedding, in `loaded(poison=True)`, is NaN: whoever reads it has no finite logits any more.
POISON = 77
PAGE_SIZE = 16
MAX_LENGTH = 96
LAWS = ("rejection", "block", "coupled")


@cache
def loaded(poison: bool = False) -> weights.Loaded:
    """The model and its head, float32; embeddings and unembedding are separate."""
    drawn = small_models.tensors(CONFIG, seed=3)
    if poison:
        name = next(name for name in drawn if name.endswith("embed_tokens.weight"))
        drawn[name] = drawn[name].copy()
        drawn[name][POISON] = np.nan
    return weights.from_tensors(CONFIG, drawn, "float32")


def engine(poison: bool = False, **options: Any) -> Engine:
    """Three lanes of up to 96 tokens on eight pages of 16, k = 3, without a tokenizer."""
    defaults: dict[str, Any] = dict(
        num_draft_tokens=3,
        max_lanes=3,
        max_length=MAX_LENGTH,
        # too few for three long requests at once: the newest is preempted now and then
        num_pages=8,
        page_size=PAGE_SIZE,
        chunk_lengths=(8, 32),
        prefill_lanes=2,
        steps_per_turn=4,
        max_mask_states=8,
    )
    return Engine(loaded(poison), None, **(defaults | options))


def hopeful(**options: Any) -> Engine:
    """One that expects replies to be short, and so admits more than the pool can hold."""
    made = engine(**options)
    made.scheduler.expected_share = 0.0
    return made


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, the poison not among them."""
    drawn = np.random.default_rng(seed).integers(0, 500, length)
    return np.where(drawn == POISON, POISON + 1, drawn).tolist()


def answer(engine: Engine, prompts: list[list[int]], params: Any) -> list[Reply]:
    """First replies."""
    return [result.reply for result in engine.generate(prompts, params)]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Seven requests of different lengths and laws of sampling."""
    prompts = [prompt(n, length) for n, length in enumerate((5, 40, 17, 1, 33, 8, 64))]
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "top_k": 20, "seed": 2},
        {"temperature": 1.2, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "min_p": 0.05, "seed": 5, "presence_penalty": 0.4},
        {"temperature": 1.0, "seed": 6, "logit_bias": {7: 2.0}},
    ]
    lengths = (24, 20, 30, 32, 9, 28, 32)
    return prompts, [
        SamplingParams(max_tokens=length, ignore_eos=True, **one) for length, one in zip(lengths, sampling, strict=True)
    ]


def assert_as_new(engine: Engine) -> None:
    """No lane, page or request is left behind, kept prefixes aside."""
    stats = engine.stats
    assert not engine.busy and not engine.scheduler.waiting
    assert stats.free_lanes == len(engine.scheduler.lanes) and stats.live == 0
    assert stats.free_pages + stats.prefix_pages == stats.num_pages
    engine.scheduler.prefixes.clear()
    assert engine.stats.free_pages == stats.num_pages
