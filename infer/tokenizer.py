"""Text to tokens and back, all of it from the checkpoint's own directory: tokenizer, chat template, generation
defaults, and the tokens that end a reply. `TextStream` turns a growing reply into text, piece by piece.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mtp.config import ModelConfig

# What one of these directories has to hold; `tokenizer_config.json` alone makes no tokenizer.
VOCABULARIES = ("tokenizer.json", "vocab.json")
DEFAULTS = ("temperature", "top_k", "top_p", "min_p")


def generation_defaults(directory: str | Path) -> dict[str, Any]:
    """What `generation_config.json` says about sampling, as fields of `SamplingParams`; empty without such a file."""
    config = _generation_config(Path(directory))
    if config is None:
        return {}
    if config.do_sample is False:
        return {"temperature": 0.0}
    found = {name: getattr(config, name, None) for name in DEFAULTS}
    return {name: value for name, value in found.items() if value is not None}


def stop_ids(directory: str | Path, config: ModelConfig, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    """Every token that ends a reply by itself: `eos_token_id` of the config, of the generation config (often a list,
    and some releases ship no such file), and of the tokenizer, which is the end of a chat turn."""
    generation = _generation_config(Path(directory))
    eos = None if generation is None else generation.eos_token_id
    listed = () if eos is None else (eos,) if isinstance(eos, int) else eos
    found = {*config.eos_token_ids, *listed, *(() if tokenizer_eos is None else (tokenizer_eos,))}
    return tuple(sorted(found))


def _generation_config(directory: Path) -> Any:
    if not (directory / "generation_config.json").is_file():
        return None
    transformers = _transformers()
    try:
        return transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{directory / 'generation_config.json'} can't be read: {_first_line(error)}") from None


def _transformers() -> Any:
    # Without this it remarks that torch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint, and what its directory says about replies."""

    inner: Any  # transformers' own
    stop_ids: tuple[int, ...]
    # sampling fields of generation_config.json
    defaults: Mapping[str, Any]

    @staticmethod
    def exists(directory: str | Path) -> bool:
        """Whether the directory of a checkpoint has a tokenizer at all."""
        return any((Path(directory) / name).is_file() for name in VOCABULARIES)

    @classmethod
    def from_pretrained(cls, directory: str | Path, config: ModelConfig) -> Self:
        """Reads the directory of a checkpoint (see `mtp.weights.resolve`).

        Raises:
            ValueError: one line; the directory has no tokenizer, or one that transformers can't read.
        """
        directory = Path(directory)
        if not cls.exists(directory):
            raise ValueError(f"{directory} has no tokenizer ({' or '.join(VOCABULARIES)}); copy its files there")
        transformers = _transformers()
        try:
            inner = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # transformers, tokenizers and json each raise their own
            raise ValueError(f"{directory}: the tokenizer can't be read: {_first_line(error)}") from None
        if len(inner) > config.vocab_size:
            raise ValueError(f"{directory}: the tokenizer has {len(inner)} tokens, config.json {config.vocab_size}")
        ends = stop_ids(directory, config, inner.eos_token_id)
        return cls(inner, ends, generation_defaults(directory))

    def __len__(self) -> int:
        """Tokens that have a text; rows of the embedding behind them are padding."""
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; markers such as `<|im_end|>` in it become their tokens."""
        return list(self.inner(text, add_special_tokens=False).input_ids)

    def chat_prompt(self, messages: Sequence[Any], thinking: bool | None = None) -> str:
        """The conversation as the checkpoint's template renders it, up to where the assistant speaks.

        `thinking` is passed to the template as `enable_thinking`; None leaves the template's own default. With thinking
        the `<think>` tag is part of the prompt: a reply starts inside, and closes it itself.

        Raises:
            ValueError: no template, or the template refuses the conversation.
        """
        if not self.inner.chat_template:
            raise ValueError("this checkpoint has no chat template; use it without --chat")
        option = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **option)
        except Exception as error:  # jinja raises its own, and Python's for messages of a wrong shape
            raise ValueError(f"the chat template refuses these messages: {_first_line(error)}") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a reply; special tokens are left out, bytes that make no character are U+FFFD."""
        return self.inner.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def num_bytes(self, token_ids: Sequence[int]) -> int:
        """Bytes of text that the tokens stand for, also where they cut through a character."""
        added = self.inner.get_added_vocab()
        tokens = self.inner.convert_ids_to_tokens(list(token_ids))
        # Byte-level BPE spells each byte as one character.
        return sum(len(token.encode()) if token in added else len(token) for token in tokens)


@dataclass
class TextStream:
    """The text of one reply as its tokens come in: whole characters only, and never part of a stop string.

    After `finish`, `text` is all that was shown, and `num_tokens` counts the tokens it takes: those that begin before
    the cut. So `decode` of them is the text, plus the rest of the last token's own text where the stop string began in
    the middle of it.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    # stop strings that would leave fewer tokens are read as text
    min_tokens: int = 0
    text: str = ""
    num_tokens: int = 0
    stopped: bool = False
    # characters of `text` already handed out
    _shown: int = 0
    # tokens whose last character is not complete
    _pending: list[int] = field(default_factory=list)
    # where in the text each token begins
    _begins: list[int] = field(default_factory=list)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that can be shown; nothing is taken once `stopped`."""
        for token in token_ids:
            if self.stopped:
                break
            self._begins.append(len(self.text))
            self.num_tokens += 1
            self._pending.append(token)
            piece = self.tokenizer.decode(self._pending)
            if not piece.endswith("\N{REPLACEMENT CHARACTER}"):
                self._take(piece)
        return self._show(len(self.text) - self._held_back())

    @property
    def num_shown(self) -> int:
        """Tokens that begin in the text handed out: no stop string can cut them off any more."""
        return self._tokens_before(self._shown)

    def finish(self) -> str:
        """Returns what was held back: no token follows."""
        if not self.stopped:
            self._take(self.tokenizer.decode(self._pending))
        return self._show(len(self.text))

    def _take(self, piece: str) -> None:
        self._pending.clear()
        known = len(self.text)
        self.text += piece
        found: list[tuple[int, int]] = []
        for stop in self.stop:
            place = self.text.find(stop, max(0, known - len(stop) + 1))
            while place >= 0 and self._tokens_before(place) < self.min_tokens:
                place = self.text.find(stop, place + 1)
            if place >= 0:
                found.append((place + len(stop), place))
        if found:
            # the one that is complete first, as if characters came one by one
            self.text, self.stopped = self.text[: min(found)[1]], True
            self.num_tokens = self._tokens_before(len(self.text))

    def _tokens_before(self, place: int) -> int:
        return sum(begin < place for begin in self._begins)

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        if self.stopped:
            return 0
        longest = max((len(stop) - 1 for stop in self.stop), default=0)
        ends = range(min(longest, len(self.text)), 0, -1)
        return next((n for n in ends if any(s.startswith(self.text[-n:]) for s in self.stop)), 0)

    def _show(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
