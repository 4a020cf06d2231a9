"""How a reply is to be made: sampling, length, stops, drafts. One frozen value that checks itself.

It imports no jax, so that a mistyped option is answered before anything is loaded.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

MAX_DRAFT_TOKENS = 7
MAX_LOGPROBS = 20
MAX_REPLIES = 64
# The same as `mtp.acceptance.LAWS`, which would import jax; a test holds them together.
LAWS = ("rejection", "block", "coupled")


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Which tokens may follow which: a grammar as a table that the device steps through, so that nobody waits for a
    callback and every slot of a window obeys it.

    `transitions[s, v]` is the state after token v in state s, -1 where v may not follow.

    Raises:
        ValueError: one line; a state that is out of range, or one in which nothing may follow.
    """

    transitions: np.ndarray
    start: int = 0

    def __post_init__(self) -> None:
        table = np.asarray(self.transitions)
        if table.ndim != 2 or table.size == 0 or not np.issubdtype(table.dtype, np.integer):
            raise ValueError(
                f"transitions of shape {table.shape} and {table.dtype} must be integers [states, vocabulary]"
            )
        states = len(table)
        if not 0 <= self.start < states:
            raise ValueError(f"start={self.start} must be one of the {states} states")
        if table.min() < -1 or table.max() >= states:
            raise ValueError(f"transitions from {table.min()} to {table.max()} must lie between -1 and {states - 1}")
        stuck = np.nonzero((table < 0).all(axis=1))[0]
        if len(stuck):
            raise ValueError(f"state {stuck[0]} allows no token: let it allow an end token at least")
        object.__setattr__(self, "transitions", table.astype(np.int32))

    @classmethod
    def allow(cls, token_ids: Sequence[int], vocab_size: int) -> Self:
        """Only these tokens, at every place. Raises ValueError if there are none, or one outside the vocabulary."""
        wrong = [i for i in token_ids if not 0 <= i < vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size}")
        table = np.full((1, vocab_size), -1, np.int32)
        table[0, list(token_ids)] = 0
        return cls(table)

    def walk(self, token_ids: Sequence[int]) -> int:
        """The state after these tokens. Raises ValueError at one that may not follow."""
        state = self.start
        for place, token in enumerate(token_ids):
            following = int(self.transitions[state, token])
            if following < 0:
                raise ValueError(f"token {token} at {place} may not follow in state {state}")
            state = following
        return state


@dataclass(frozen=True)
class SamplingParams:
    """What one reply is asked for.

    Raises:
        ValueError: one line with the name, the value and the allowed range.
    """

    # 0 is greedy
    temperature: float = 0.0
    # 0 is off
    top_k: int = 0
    # 1 is off
    top_p: float = 1.0
    # 0 is off
    min_p: float = 0.0
    # subtracted once from the logits of tokens that the reply has already, and once for each time it has them
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # divides the positive and multiplies the negative logits of tokens that prompt or reply have; 1 is off
    repetition_penalty: float = 1.0
    # added to the raw logits of some tokens, by id; a mapping, kept as sorted pairs
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    # which tokens may follow which
    allowed: TokenAutomaton | None = None
    seed: int = 0
    # which of the replies drawn with this seed
    sample_index: int = 0
    max_tokens: int = 128
    # stop tokens can't be chosen, and stop strings don't count, before so many tokens
    min_tokens: int = 0
    # texts that end the reply; the text is cut before them
    stop: tuple[str, ...] = ()
    # tokens that end the reply beside the model's own
    stop_token_ids: tuple[int, ...] = ()
    # the model's own end tokens don't end the reply
    ignore_eos: bool = False
    # log-probabilities of the emitted tokens under the target's own law: None, or with so many of the best ones
    logprobs: int | None = None
    # replies to the prompt, which differ in their sample index
    n: int = 1
    # k: drafts a verify step; 0 is plain decoding, "auto" lets the engine choose; None is the engine's own
    num_draft_tokens: int | str | None = None
    # law of acceptance; None is the engine's
    verify: str | None = None

    def __post_init__(self) -> None:
        number, integer = _is_number, _is_integer
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        for name, good, allowed in (
            ("temperature", lambda x: number(x) and 0 <= x <= 1e6, "a number from 0 to 1e6 (0 is greedy)"),
            ("top_k", lambda x: integer(x) and 0 <= x < 2**31, "an integer from 0 to 2**31 - 1 (0 is off)"),
            ("top_p", lambda x: number(x) and 0 < x <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", lambda x: number(x) and 0 <= x <= 1, "from 0 to 1 (0 is off)"),
            ("presence_penalty", lambda x: number(x) and -2 <= x <= 2, "from -2 to 2 (0 is off)"),
            ("frequency_penalty", lambda x: number(x) and -2 <= x <= 2, "from -2 to 2 (0 is off)"),
            ("repetition_penalty", lambda x: number(x) and 1e-3 <= x <= 1e3, "from 0.001 to 1000 (1 is off)"),
            ("allowed", lambda x: x is None or isinstance(x, TokenAutomaton), "a TokenAutomaton"),
            ("seed", lambda x: integer(x) and 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"),
            (
                "sample_index",
                lambda x: integer(x) and x >= 0 and (not integer(self.n) or x + self.n <= 2**32),
                f"an integer from 0 to 2**32 - n, and n={self.n}",
            ),
            ("max_tokens", lambda x: integer(x) and 1 <= x < 2**31, "an integer of at least 1"),
            (
                "min_tokens",
                lambda x: integer(x) and 0 <= x <= self.max_tokens,
                f"an integer from 0 to max_tokens={self.max_tokens}",
            ),
            ("stop", lambda x: _all(x, lambda s: isinstance(s, str) and s), "strings that are not empty"),
            (
                "stop_token_ids",
                lambda x: _all(x, lambda i: integer(i) and 0 <= i < 2**31),
                "token ids, integers of at least 0",
            ),
            ("ignore_eos", lambda x: isinstance(x, bool), "true or false"),
            (
                "num_draft_tokens",
                lambda x: x in (None, "auto") or (integer(x) and 0 <= x <= MAX_DRAFT_TOKENS),
                f"an integer from 0 to {MAX_DRAFT_TOKENS}, or auto",
            ),
            ("verify", lambda x: x is None or x in LAWS, f"one of {', '.join(LAWS)}"),
            (
                "logprobs",
                lambda x: x is None or (integer(x) and 0 <= x <= MAX_LOGPROBS),
                f"an integer from 0 to {MAX_LOGPROBS}",
            ),
            ("n", lambda x: integer(x) and 1 <= x <= MAX_REPLIES, f"an integer from 1 to {MAX_REPLIES}"),
        ):
            value = getattr(self, name)
            if not good(value):
                raise ValueError(f"{name}={value!r} must be {allowed}")

    def with_defaults(self, *, num_draft_tokens: int | str, verify: str) -> Self:
        """The same with what is left to the engine filled in."""
        k = num_draft_tokens if self.num_draft_tokens is None else self.num_draft_tokens
        return dataclasses.replace(self, num_draft_tokens=k, verify=self.verify or verify)

    def with_fields(self, fields: Mapping[str, Any]) -> Self:
        """The same with some fields changed, as read from JSON: lists become tuples, one stop string may stand alone.

        Raises:
            ValueError: also for an unknown name; the message has the nearest known one.
        """
        known = typing.get_type_hints(type(self))
        changed: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ValueError(f"unknown sampling field {name!r}{hint}")
            if name == "stop" and isinstance(value, str):
                value = (value,)
            changed[name] = tuple(value) if isinstance(value, list) else value
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True)
class Task:
    """A prompt ready to be run."""

    token_ids: list[int]
    params: SamplingParams


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """A bias by token id, whose keys may be text as in JSON, as sorted pairs."""
    try:
        pairs = tuple(given.items() if isinstance(given, Mapping) else given)
        found = {int(token): float(value) for token, value in pairs}
        if any(not isinstance(token, str) and int(token) != token for token, _ in pairs):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias={given!r} must map token ids to numbers") from None
    wrong = [(t, v) for t, v in found.items() if t < 0 or not -100 <= v <= 100]
    if wrong:
        raise ValueError(
            f"logit_bias of token {wrong[0][0]} is {wrong[0][1]}: ids must not be negative, values from -100 to 100"
        )
    return tuple(sorted(found.items()))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _all(values: Any, good: Callable[[Any], Any]) -> bool:
    return isinstance(values, tuple) and all(good(value) for value in values)
