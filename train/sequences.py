"""What a line of training data becomes: sequences of tokens, and which of them are learned.

A line is a reply of the target, a conversation or a text. A conversation gives one sequence for each turn of the
assistant, rendered by the checkpoint's own template as if nothing came after it, because templates strip the thinking
of earlier turns. Only that turn is learned: from where the assistant is asked to speak (a `<think>` that serving puts
into the prompt is not its own) up to the token that ends the turn. The rendered text is tokenised once, and a token is
the assistant's if it begins inside the turn; one that straddles the border belongs to the prompt.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from mtp.config import ModelConfig

# With fewer learned tokens there is no draft to learn: the first one follows from the prompt's own pass.
LEAST = 2
VOCABULARIES = ("tokenizer.json", "vocab.json")
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Kind = Literal["reply", "conversation", "text"]
Span = tuple[int, int]


@dataclass(frozen=True)
class DataSettings:
    """The file, and what is learned of it."""

    # JSONL of replies by `train.generate_data replies` with this model, {"messages": [...]} or {"text": ...}
    path: Path
    held_out_fraction: float  # of the prompts
    # of replies and conversations: what the assistant thinks, with the tags, and the token that ends its turn
    learn_thinking: bool
    learn_end_of_turn: bool


class Refusal(StrEnum):
    """Why nothing is learned from a turn, a reply or a text."""

    # also where there is no turn of the assistant
    NOTHING = "nothing learned"
    # of a conversation, which always begins with something that was asked
    EVERYTHING = "everything learned"
    # what is left of a long sequence
    CUT = "cut away"


@dataclass(frozen=True)
class Sequence:
    """Tokens that are read together."""

    kind: Kind
    tokens: np.ndarray  # int32
    learned: np.ndarray  # bool, for each token

    @classmethod
    def reply(cls, prompt: Iterable[int], reply: Iterable[int]) -> Self:
        """A prompt and what the target answered."""
        parts = [np.asarray([*ids], np.int32) for ids in (prompt, reply)]
        return cls("reply", np.concatenate(parts), np.repeat([False, True], [len(part) for part in parts]))


@dataclass(frozen=True)
class Reader:
    """Makes sequences of lines, with a checkpoint's tokenizer and template."""

    tokenizer: Any  # transformers' own
    settings: DataSettings
    # tokens of a sequence; what is longer is cut
    length: int
    # tokens that end a turn
    ends: tuple[int, ...]

    @classmethod
    def open(cls, directory: Path, model: ModelConfig, settings: DataSettings, length: int) -> Self:
        """With the tokenizer in the directory of a checkpoint.

        Raises:
            ValueError: it has none, or one without the tags that `learn_thinking=false` needs.
        """
        # transformers makes one of nothing
        if not any((directory / name).is_file() for name in VOCABULARIES):
            raise ValueError(f"{directory} has no tokenizer ({' or '.join(VOCABULARIES)}); copy its files there")
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # transformers, tokenizers and json each raise their own
            raise ValueError(f"{directory}: the tokenizer can't be read: {_first_line(error)}") from None
        if not settings.learn_thinking and not {"<think>", "</think>"} <= set(tokenizer.get_vocab()):
            raise ValueError("data.learn_thinking=false needs a tokenizer with the tokens <think> and </think>")
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        return cls(tokenizer, settings, length, (*model.eos_token_ids, *own))

    @property
    def template(self) -> str:
        """The chat template, or an empty text."""
        return self.tokenizer.chat_template or ""

    @property
    def marked(self) -> bool:
        """Whether the template itself marks what the assistant wrote, with `{% generation %}`; it is then believed."""
        return MARKER.search(self.template) is not None

    @property
    def hashes(self) -> dict[str, str]:
        """What sequences depend on beside the file and the settings."""
        texts = {"tokenizer": self.tokenizer.backend_tokenizer.to_str(), "template": self.template}
        return {f"{name}_sha256": hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}

    def read(self, line: bytes) -> tuple[str, list[Sequence | Refusal]]:
        """The prompt's name, which all samples of a prompt and turns of a conversation share, and one sequence or
        refusal for each turn of a conversation, else just one.

        Raises:
            ValueError: the line is of no kind, or the template refuses it or rewrites what came before a turn.
        """
        try:
            record = json.loads(line)
        except ValueError:
            raise ValueError("this is not JSON") from None
        match record:
            case {"prompt_token_ids": list(prompt), "token_ids": list(reply), "id": name}:
                return str(name), [self._reply(prompt, reply)]
            case {"token_ids": _} | {"messages": _, "text": _}:
                pass  # half a reply, or two kinds at once
            case {"messages": list(messages)} if all(isinstance(m, dict) and "role" in m for m in messages):
                # as transformers does before it renders
                messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
                turns = _turns(messages)
                made = [self._turn(messages[: turn + 1], record.get("tools")) for turn in turns]
                prompt = messages[: turns[0]] if turns else messages
                return str(record.get("id", json.dumps(prompt))), made or [Refusal.NOTHING]
            case {"text": str(text)}:
                tokens, _ = self._encode(text)
                return str(record.get("id", text)), [self._finish("text", tokens, np.arange(len(tokens)) > 0)]
        raise ValueError('neither a reply of `train.generate_data replies` nor {"messages": [...]} nor {"text": ...}')

    def _reply(self, prompt: list[int], reply: list[int]) -> Sequence | Refusal:
        try:
            made = Sequence.reply(prompt, reply)
        except (ValueError, TypeError, OverflowError):
            raise ValueError("token ids must be whole numbers") from None
        return self._finish(made.kind, made.tokens, made.learned)

    def _turn(self, messages: list[dict[str, Any]], tools: Any) -> Sequence | Refusal:
        """The last of the messages, which is the assistant's."""
        text, spans = self._render(messages, tools)
        tokens, begins = self._encode(text)
        if self.marked:
            # earlier turns have marks too
            own = spans[len(self._render(messages[:-1], tools)[1]) :]
        else:
            own = spans = [(self._prompt_end(text, messages[:-1], tools), len(text))]
        if _inside(begins, spans).all():
            return Refusal.EVERYTHING
        learned = _inside(begins, own)
        if not learned.any():
            return Refusal.NOTHING
        # a reply ends with the first such token when served; the template's newline behind it is nobody's
        first = int(learned.argmax())
        ends = first + np.flatnonzero(np.isin(tokens[first:], self.ends))
        if ends.size:
            learned[ends[0] + 1 :] = False
            learned[ends[0]] = True
        return self._finish("conversation", tokens, learned)

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: bool) -> tuple[str, list[Span]]:
        """The text, and its marked spans."""
        if not self.template:
            raise ValueError("this checkpoint has no chat template")
        options |= {"return_assistant_tokens_mask": self.marked, **self.tokenizer.special_tokens_map}
        try:
            (text,), spans = render_jinja_template([messages], tools, chat_template=self.template, **options)
        except Exception as error:  # jinja raises its own, and Python's for messages of a wrong shape
            raise ValueError(f"the chat template refuses this conversation: {_first_line(error)}") from None
        return text, spans[0] if self.marked else []

    def _prompt_end(self, text: str, messages: list[dict[str, Any]], tools: Any) -> int:
        """Characters of the rendered text that the assistant is given. Both prompts fit a turn without thinking; it is
        served with the longer one, which holds the empty block."""
        prompts = [
            self._render(messages, tools, add_generation_prompt=True, enable_thinking=thinking)[0]
            for thinking in (True, False)
        ]
        fitting = [len(prompt) for prompt in prompts if text.startswith(prompt)]
        if not fitting:
            raise ValueError(
                "the chat template rewrites what comes before the assistant's turn once that is there, so that the "
                "turn's tokens can't be told; mark them with {% generation %} in the template"
            )
        return max(fitting)

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, and the character at which each begins: of several tokens for one character, that one."""
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except TypeError:
            raise ValueError("the text has half of a surrogate pair in it") from None
        return np.asarray(encoded.input_ids, np.int32), np.asarray([begin for begin, _ in encoded.offset_mapping])

    def _finish(self, kind: Kind, tokens: np.ndarray, learned: np.ndarray) -> Sequence | Refusal:
        """Applies the switches and cuts."""
        if kind != "text" and not self.settings.learn_end_of_turn:
            learned = learned & ~np.isin(tokens, self.ends)
        if kind != "text" and not self.settings.learn_thinking:
            learned = learned & ~self._thinking(tokens)
        if learned.sum() < LEAST:
            return Refusal.NOTHING
        tokens, learned = tokens[: self.length], learned[: self.length]
        return Sequence(kind, tokens, learned) if learned.sum() >= LEAST else Refusal.CUT

    def _thinking(self, tokens: np.ndarray) -> np.ndarray:
        """Where the tokens are a think block, with its tags and the newlines that the template puts behind it."""
        opened, closed = (tokens == tag for tag in self.tokenizer.convert_tokens_to_ids(["<think>", "</think>"]))
        marks = opened | closed | np.isin(tokens, self.ends)
        newest = np.maximum.accumulate(np.where(marks, np.arange(len(tokens)), 0))
        thinking = opened[newest] | closed
        for place in np.flatnonzero(closed[:-1]) + 1:
            thinking[place] |= not self.tokenizer.decode([int(tokens[place])]).strip("\n")
        return thinking


def _turns(messages: list[dict[str, Any]]) -> list[int]:
    """The assistant's turns that answer something: not what it says before the user's first."""
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    return [turn for turn in range(first, len(roles)) if roles[turn] == "assistant"]


def _inside(begins: np.ndarray, spans: list[Span]) -> np.ndarray:
    inside = np.zeros(len(begins), bool)
    for start, end in spans:
        inside |= (begins >= start) & (begins < end)
    return inside


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
