"""Each field of `SamplingParams` refuses what lies outside its range, in one line that names it."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from infer.params import LAWS, MAX_DRAFT_TOKENS, SamplingParams, TokenAutomaton
from mtp import acceptance

BAD: list[tuple[str, Any]] = [
    ("temperature", -1.0),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    # more than float32 holds, as the device gets it
    ("temperature", 1e39),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", -1),
    ("seed", 2**32),
    ("sample_index", -1),
    ("sample_index", 2**32),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", 129),
    ("stop", ("",)),
    ("stop", "text"),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (2**31,)),
    ("stop_token_ids", ("a",)),
    ("ignore_eos", 1),
    ("num_draft_tokens", -1),
    ("num_draft_tokens", 8),
    ("num_draft_tokens", 2.0),
    ("num_draft_tokens", "none"),
    ("num_draft_tokens", True),
    ("verify", "greedy"),
    ("presence_penalty", -2.01),
    ("presence_penalty", 2.01),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.01),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", 1e39),
    # its inverse would be
    ("repetition_penalty", 1e-39),
    ("allowed", (1, 2)),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("n", 0),
    ("n", 65),
    ("n", 1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}={value!r} must be ") and "\n" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "max_tokens": 1, "num_draft_tokens": 0},
        {"temperature": 99.5, "top_k": 10**6, "top_p": 1e-9, "min_p": 1.0, "seed": 2**32 - 1},
        {"max_tokens": 7, "min_tokens": 7, "stop": ["a", "b\n"], "stop_token_ids": [0, 5], "ignore_eos": True},
        {"num_draft_tokens": MAX_DRAFT_TOKENS, "verify": "coupled", "stop": "alone"},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.001, "logprobs": 0, "n": 1},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1000, "logprobs": 20, "n": 64},
        {"num_draft_tokens": "auto", "verify": None, "logprobs": None, "allowed": TokenAutomaton.allow([1], 4)},
    ],
)
def test_takes_the_ends_of_each_range(fields: dict[str, Any]) -> None:
    params = SamplingParams().with_fields(fields)
    for name, value in fields.items():
        kept = (value,) if name == "stop" and isinstance(value, str) else value
        assert getattr(params, name) == (tuple(kept) if isinstance(kept, list) else kept)
    hash(params)


def test_unknown_fields_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams().with_fields({"temprature": 1.0})


@pytest.mark.parametrize(
    "given", [{5: 1, 3: -100.0}, {"5": 1.0, "3": -100}, ((5, 1.0), (3, -100.0)), [[5, 1.0], [3, -100.0]]]
)
def test_a_bias_is_kept_as_sorted_pairs(given: Any) -> None:
    """Whether its keys are numbers or, as in JSON, text; equal biases make equal and hashable values."""
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((3, -100.0), (5, 1.0))
    assert all(type(token) is int and type(value) is float for token, value in params.logit_bias)
    assert params == SamplingParams().with_fields({"logit_bias": given}) and hash(params)


@pytest.mark.parametrize(
    "given",
    [{-1: 1.0}, {1: 100.5}, {1: -math.inf}, {1: math.nan}, {"a": 1.0}, {"1.7": 1.0}, {1: "x"}, {1.7: 1.0}, 3, (1, 2)],
)
def test_a_bad_bias_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="^logit_bias") as error:
        SamplingParams(logit_bias=given)
    assert "\n" not in str(error.value)


def test_all_replies_have_a_sample_index_that_the_noise_can_count() -> None:
    """The last of them has sample_index + n - 1, 32 bits of it."""
    assert SamplingParams(sample_index=2**32 - 4, n=4).n == 4
    with pytest.raises(ValueError, match=r"sample_index=4294967293 must be an integer from 0 to 2\*\*32 - n, and n=4"):
        SamplingParams(sample_index=2**32 - 3, n=4)


def test_what_is_left_to_the_engine_is_filled_in_and_nothing_else() -> None:
    open_ = SamplingParams(temperature=0.5).with_defaults(num_draft_tokens="auto", verify="block")
    assert open_ == SamplingParams(temperature=0.5, num_draft_tokens="auto", verify="block")
    chosen = SamplingParams(num_draft_tokens=0, verify="coupled")
    assert chosen.with_defaults(num_draft_tokens=3, verify="block") == chosen


def test_an_automaton_walks_and_refuses() -> None:
    table = np.array([[1, -1, 0], [-1, 0, -1]])
    automaton = TokenAutomaton(table, start=1)
    # its own copy, as the device wants it
    table[:] = -1
    assert automaton.transitions.dtype == np.int32
    assert [automaton.walk(tokens) for tokens in ([], [1], [1, 2, 2], [1, 0])] == [1, 0, 0, 1]
    with pytest.raises(ValueError, match="token 1 at 2 may not follow in state 0"):
        automaton.walk([1, 2, 1])


@pytest.mark.parametrize(
    "transitions, start, message",
    [
        ([[0, -1], [-1, -1]], 0, "state 1 allows no token"),
        ([[0, 2], [0, 1]], 0, "between -1 and 1"),
        ([[0, -2], [0, 1]], 0, "between -1 and 1"),
        ([[0, 0]], 1, "start=1 must be one of the 1 states"),
        ([[0, 0]], -1, "start=-1 must be one of the 1 states"),
        ([0, 0], 0, "must be integers"),
        ([[0.0, 0.0]], 0, "must be integers"),
        (np.zeros((0, 4), np.int32), 0, "must be integers"),
    ],
)
def test_a_table_that_is_no_automaton_is_refused(transitions: Any, start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenAutomaton(np.asarray(transitions), start)


def test_allowing_some_tokens_allows_no_others() -> None:
    automaton = TokenAutomaton.allow([4, 2, 4], 6)
    assert automaton.transitions.tolist() == [[-1, -1, 0, -1, 0, -1]]
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of 6"):
            TokenAutomaton.allow([1, wrong], 6)
    with pytest.raises(ValueError, match="state 0 allows no token"):
        TokenAutomaton.allow([], 6)


def test_laws_are_those_of_acceptance() -> None:
    assert LAWS == acceptance.LAWS


def test_params_import_nothing_heavy() -> None:
    program = "import sys, infer.params, infer.generate; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
