"""How a reply is to be made: sampling, length, stops, drafts. One frozen value that checks itself.

It imports nothing heavy, so that a mistyped option is answered before anything is loaded.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

MAX_DRAFT_TOKENS = 7
# The same as `mtp.acceptance.LAWS`, which would import jax; a test holds them together.
LAWS = ("rejection", "block", "coupled")


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
    # k: drafts a verify step; 0 is plain decoding
    num_draft_tokens: int = 3
    # law of acceptance
    verify: str = "rejection"

    def __post_init__(self) -> None:
        number, integer = _is_number, _is_integer
        for name, good, allowed in (
            ("temperature", lambda x: number(x) and x >= 0, "a number of at least 0 (0 is greedy)"),
            ("top_k", lambda x: integer(x) and x >= 0, "an integer of at least 0 (0 is off)"),
            ("top_p", lambda x: number(x) and 0 < x <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", lambda x: number(x) and 0 <= x <= 1, "from 0 to 1 (0 is off)"),
            ("seed", lambda x: integer(x) and 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"),
            ("sample_index", lambda x: integer(x) and 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"),
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
                lambda x: integer(x) and 0 <= x <= MAX_DRAFT_TOKENS,
                f"an integer from 0 to {MAX_DRAFT_TOKENS}",
            ),
            ("verify", lambda x: x in LAWS, f"one of {', '.join(LAWS)}"),
        ):
            value = getattr(self, name)
            if not good(value):
                raise ValueError(f"{name}={value!r} must be {allowed}")

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


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _all(values: Any, good: Callable[[Any], Any]) -> bool:
    return isinstance(values, tuple) and all(good(value) for value in values)
