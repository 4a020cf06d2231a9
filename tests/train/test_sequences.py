"""Lines of training data: which tokens of a conversation are learned, what is refused, and what all lines add up to."""

import copy
import json
import unicodedata
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from infer.tokenizer import Tokenizer
from mtp.config import ModelConfig
from tests.infer import small_models
from train.head_data import HeadData, open_data
from train.sequences import DataSettings, Reader, Refusal, Sequence

DEMO = small_models.demo_file("config.json").parent
MODEL = ModelConfig.from_pretrained(DEMO)
SERVED = Tokenizer.from_pretrained(DEMO, MODEL)
OPENED = Reader.open(DEMO, MODEL, DataSettings(Path("-"), 0.5, True, True), 512)
IM_END = 8185

# Characters of one to four bytes, of several code points, that NFC joins or that tokens cut through.
PIECES = (
    "def ",
    "x",
    "\n",
    "\n\n",
    "  ",
    "é",
    "e\u0301",
    "\u0301",
    "中",
    "文字",
    "\U0001f600",
    "👩‍👩‍👧",
    "ﬁ",
    "\u200b",
    "the city",
    "0",
)

HEADED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m.content }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = HEADED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def reader(
    template: str | None = None, thinking: bool = True, end: bool = True, length: int = 512, path: Path = Path("-")
) -> Reader:
    tokenizer = copy.copy(OPENED.tokenizer)
    if template is not None:
        tokenizer.chat_template = template
    return Reader(tokenizer, DataSettings(path, 0.5, thinking, end), length, OPENED.ends)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str | None = None) -> dict[str, str]:
    said = {"role": "assistant", "content": content}
    return said if reasoning is None else said | {"reasoning_content": reasoning}


def read(one: Reader, record: Any) -> list[Sequence | Refusal]:
    return one.read(json.dumps(record).encode())[1]


def turns(one: Reader, *messages: dict[str, str]) -> list[Sequence]:
    made = read(one, {"messages": messages})
    assert all(isinstance(turn, Sequence) for turn in made)
    return [turn for turn in made if isinstance(turn, Sequence)]


def decode(tokens: Any) -> str:
    return SERVED.inner.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)


def learned(one: Sequence) -> str:
    return decode(one.tokens[one.learned])


def random_texts(seed: int) -> Iterator[str]:
    """Without blanks around them, which the template takes away, and never empty."""
    rng = np.random.default_rng(seed)
    while True:
        text = "".join(rng.choice(PIECES, rng.integers(1, 12))).strip()
        if text:
            yield text


# Conversations


@pytest.mark.parametrize(("thinking", "end"), list(product((True, False), repeat=2)))
def test_learned_are_exactly_the_assistants_tokens(thinking: bool, end: bool) -> None:
    """What is read before them is the very prompt of serving, in its very tokens."""
    one, all_of_it, texts = reader(thinking=thinking, end=end), reader(), random_texts(0)
    refused = 0
    for thinks in (True, False) * 40:
        messages = [user(next(texts)), assistant(next(texts)), user(next(texts))]
        reasoning, content = next(texts), next(texts)
        last = assistant(content, reasoning if thinks else None)
        block = f"{reasoning}\n</think>\n\n" if thinks and thinking else ""
        expected = unicodedata.normalize("NFC", block + content) + ("<|im_end|>" if end else "")
        made = read(one, {"messages": [*messages, last]})[-1]
        if isinstance(made, Refusal):
            # a single token is no draft
            assert made is Refusal.NOTHING and not end and len(SERVED.encode(block + content)) == 1
            refused += 1
            continue
        assert learned(made) == expected
        whole = turns(all_of_it, *messages, last)[-1]
        np.testing.assert_array_equal(whole.tokens, made.tokens)
        prompt = SERVED.encode(SERVED.chat_prompt(messages, thinking=thinks))
        assert whole.tokens[: whole.learned.argmax()].tolist() == prompt
        assert whole.tokens.tolist() == SERVED.inner.apply_chat_template([*messages, last])["input_ids"]
    assert refused < 20


def test_each_turn_is_learned_once_as_if_it_were_the_last() -> None:
    """Earlier thinking is gone, as it is when the conversation goes on; a turn that is still the last keeps its own."""
    said = [user("one?"), assistant("ONE", "THINK1"), user("two?"), assistant("TWO", "THINK2"), user("three?")]
    first, second = turns(reader(), *said)
    assert learned(first) == "THINK1\n</think>\n\nONE<|im_end|>"
    assert learned(second) == "THINK2\n</think>\n\nTWO<|im_end|>"
    assert "THINK1" not in decode(second.tokens) and "ONE" in decode(second.tokens)
    assert "two?" not in decode(first.tokens)


def test_what_is_said_before_the_user_asks_is_only_read() -> None:
    (one,) = turns(reader(), assistant("Hello!"), user("Who?"), assistant("Me."))
    assert learned(one) == "Me.<|im_end|>" and "Hello!" in decode(one.tokens)


def test_calls_of_tools_are_turns_and_their_answers_are_not() -> None:
    """Thinking stays until the user speaks again; the tools stand in the prompt."""
    call = {"function": {"name": "look", "arguments": {"where": "up"}}}
    messages = [
        user("Look."),
        {"role": "assistant", "content": None, "reasoning_content": "T1", "tool_calls": [call]},
        {"role": "tool", "content": "ANSWER"},
        assistant("Sky.", "T2"),
    ]
    tools = [{"name": "look", "description": "TOOL"}]
    first, second = read(reader(), {"messages": messages, "tools": tools})
    assert isinstance(first, Sequence) and isinstance(second, Sequence)
    assert learned(first).startswith("T1\n</think>\n\n<tool_call>\n<function=look>")
    assert learned(first).endswith("</tool_call><|im_end|>") and learned(second) == "T2\n</think>\n\nSky.<|im_end|>"
    assert "T1" in decode(second.tokens) and "ANSWER" in decode(second.tokens) and "TOOL" in decode(first.tokens)


def test_a_turn_ends_at_its_first_end_of_turn() -> None:
    """As it would when served, also where the text has one in the middle."""
    (one,) = turns(reader(), user("a"), assistant("stop here<|im_end|> and more"))
    assert learned(one) == "stop here<|im_end|>"
    assert IM_END in one.tokens[one.learned]


# Templates


def test_marks_of_a_template_are_taken_and_agree_with_finding_the_turn_without_them() -> None:
    """The oracle is transformers' own mask, less that of what came before."""
    marked, plain, texts = reader(HEADED), reader(UNMARKED), random_texts(1)
    assert marked.marked and not plain.marked
    oracle = AutoTokenizer.from_pretrained(DEMO)
    options: dict[str, Any] = dict(chat_template=HEADED, return_dict=True, return_assistant_tokens_mask=True)
    for _ in range(20):
        messages = [role(next(texts)) for role in (user, assistant, user, assistant)]
        for count, one, other in zip((2, 4), turns(marked, *messages), turns(plain, *messages), strict=True):
            whole = oracle.apply_chat_template(messages[:count], **options)
            before = oracle.apply_chat_template(messages[: count - 1], **options)["assistant_masks"]
            mask = [*[0] * len(before), *whole["assistant_masks"][len(before) :]]
            assert one.tokens.tolist() == whole["input_ids"] and one.learned.tolist() == [bool(x) for x in mask]
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.learned, other.learned)


def test_the_end_of_a_turn_is_learned_also_where_marks_leave_it_out() -> None:
    outside = HEADED.replace("{{ '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
    assert learned(*turns(reader(outside), user("a"), assistant("b c"))) == "b c<|im_end|>"
    assert learned(*turns(reader(outside, end=False), user("a"), assistant("one more"))) == "one more"


@pytest.mark.parametrize("marks", [True, False])
def test_a_token_that_straddles_the_border_is_the_prompts(marks: bool) -> None:
    """The space before the assistant's text is the template's, but the token of its first word."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A: ' }}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ '<|im_end|>' }}{% else %}{{ 'Q: ' + m.content + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
    )
    if not marks:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (one,) = turns(reader(template), user("where"), assistant("the city"))
    assert " the" in [decode([token]) for token in one.tokens[~one.learned]]
    assert learned(one) == " city<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% generation %}" + UNMARKED + "{% endgeneration %}",
        "{% if not add_generation_prompt %}{{ messages[-1].content }}{% endif %}",
    ],
)
def test_a_template_that_gives_the_assistant_everything_is_refused(template: str) -> None:
    assert read(reader(template), {"messages": [user("a b"), assistant("c d")]}) == [Refusal.EVERYTHING]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages | length }} messages" + UNMARKED, "the chat template rewrites what comes before"),
        ("{{ raise_exception('No.') }}", "the chat template refuses this conversation: No."),
        ("{{ messages[9].content.x }}", "the chat template refuses this conversation: "),
        ("", "this checkpoint has no chat template"),
    ],
)
def test_a_template_that_can_not_be_used_is_told(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(reader(template), {"messages": [user("a"), assistant("b")]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_think_tag_that_the_prompt_does_not_hold_is_the_assistants(thinking: bool) -> None:
    """As in templates that leave it to the model whether it thinks."""
    demo = OPENED.template
    template = demo.replace(
        "'<|im_start|>assistant\\n<think>\\n' ~ ('' if thinking else '\\n</think>",
        "'<|im_start|>assistant\\n' ~ ('' if thinking else '<think>\\n\\n</think>",
    )
    assert template != demo
    one = reader(template, thinking=thinking)
    block = "<think>\nHm.\n</think>\n\n" if thinking else ""
    assert learned(*turns(one, user("a"), assistant("b c", "Hm."))) == block + "b c<|im_end|>"
    assert learned(*turns(one, user("a"), assistant("b c"))) == "b c<|im_end|>"


def test_a_think_tag_of_the_users_opens_nothing_in_the_assistants_turn() -> None:
    assert learned(*turns(reader(UNMARKED, thinking=False), user("Say <think>"), assistant("b c"))) == "b c<|im_end|>"


def test_a_tokenizer_without_tags_can_not_leave_thinking_out(tmp_path: Path) -> None:
    for name in small_models.TOKENIZER_FILES:
        text = small_models.demo_file(name).read_text()
        (tmp_path / name).write_text(text.replace('"</think>"', '"</thought>"'))
    Reader.open(tmp_path, MODEL, DataSettings(Path("-"), 0.5, True, True), 8)
    with pytest.raises(ValueError, match="learn_thinking=false needs a tokenizer with the tokens <think> and </think>"):
        Reader.open(tmp_path, MODEL, DataSettings(Path("-"), 0.5, False, True), 8)


def test_a_checkpoint_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    small_models.write(tmp_path, with_tokenizer=False)
    with pytest.raises(ValueError, match=r"has no tokenizer \(tokenizer.json or vocab.json\)"):
        Reader.open(tmp_path, MODEL, DataSettings(Path("-"), 0.5, True, True), 8)
    (tmp_path / "tokenizer.json").write_text("{\n}")
    with pytest.raises(ValueError, match="the tokenizer can't be read") as caught:
        Reader.open(tmp_path, MODEL, DataSettings(Path("-"), 0.5, True, True), 8)
    assert "\n" not in str(caught.value)


# Replies and texts


@pytest.mark.parametrize(("thinking", "end"), list(product((True, False), repeat=2)))
def test_a_reply_is_learned_as_the_turn_that_it_is(thinking: bool, end: bool) -> None:
    """The tokens of a conversation, given as the prompt and the reply of the engine: the same mask."""
    for reasoning in ("Let me see.", None):
        messages = [user("Say <think> twice."), assistant("One, two, three.", reasoning)]
        (all_of_it,) = turns(reader(), *messages)
        prompt, stop = int(all_of_it.learned.argmax()), int(np.flatnonzero(all_of_it.learned)[-1]) + 1
        tokens = all_of_it.tokens.tolist()
        record = {"id": 1, "prompt_token_ids": tokens[:prompt], "token_ids": tokens[prompt:stop], "text": "-"}
        one = reader(thinking=thinking, end=end)
        (reply,), (turn,) = read(one, record), turns(one, *messages)
        assert isinstance(reply, Sequence) and reply.kind == "reply"
        np.testing.assert_array_equal(reply.learned, turn.learned[:stop])


def test_a_reply_that_ends_while_it_thinks_has_nothing_but_thinking() -> None:
    prompt = SERVED.encode(SERVED.chat_prompt([user("Why?")], thinking=True))
    record = {"id": 1, "prompt_token_ids": prompt, "token_ids": SERVED.encode("Let me think about it, and")}
    assert read(reader(thinking=False), record) == [Refusal.NOTHING]
    (whole,) = read(reader(), record)
    assert isinstance(whole, Sequence) and int(whole.learned.sum()) == len(record["token_ids"])


def test_of_a_text_all_is_learned_but_its_first_token() -> None:
    """Switches are about turns, and a text has none."""
    for text, settings in product(("A lighthouse 中\U0001f600.", "<think>a</think> b<|im_end|> c"), (True, False)):
        (one,) = read(reader(thinking=settings, end=settings), {"text": text})
        assert isinstance(one, Sequence) and one.kind == "text"
        assert one.tokens.tolist() == SERVED.encode(text)
        assert one.learned.tolist() == [place > 0 for place in range(len(one.tokens))]
    assert read(reader(), {"text": ""}) == read(reader(), {"text": "x"}) == [Refusal.NOTHING]


def test_long_sequences_are_cut() -> None:
    record = {"messages": [user("where is it"), assistant("word " * 50)]}
    (whole,) = read(reader(), record)
    assert isinstance(whole, Sequence)
    first = int(whole.learned.argmax())
    for length in (first + 2, first + 20):
        (one,) = read(reader(length=length), record)
        assert isinstance(one, Sequence)
        np.testing.assert_array_equal(one.tokens, whole.tokens[:length])
        np.testing.assert_array_equal(one.learned, whole.learned[:length])
    assert read(reader(length=first + 1), record) == [Refusal.CUT]


# Files


def opened(path: Path, records: list[Any], length: int = 512) -> HeadData:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return open_data(reader(length=length, path=path))


def test_every_line_is_accounted_for(tmp_path: Path) -> None:
    fine = [{"text": f"The city of {number}"} for number in range(20)]
    long = user("word " * 60)
    others = [
        {"messages": [user("nobody answers")]},
        {"messages": [{"role": "system", "content": "x"}, assistant("nobody asked")]},
        {"messages": []},
        {"messages": [user("a"), assistant("")]},
        {"messages": [long, assistant("cut away")]},
        {"id": 3, "prompt_token_ids": [1] * 40, "token_ids": [2, 3]},
        {"id": 4, "prompt_token_ids": [1, 2], "token_ids": [3]},
        # one line that is done, though its second turn is behind the cut
        {"messages": [user("a"), assistant("b c"), long, assistant("d e")]},
    ]
    counts = opened(tmp_path / "in.jsonl", [*fine, *others], length=32).counts
    assert counts.refused == {"nothing learned": 5, "everything learned": 0, "cut away": 2}
    assert counts.refused_turns == {"nothing learned": 0, "everything learned": 0, "cut away": 1}
    assert counts.done == 21 and counts.done + sum(counts.refused.values()) == counts.lines == 28


def test_all_of_a_prompt_is_on_one_side(tmp_path: Path) -> None:
    """The turns of a conversation, and what else begins as it does; a name decides where there is one."""
    asked = [[user(f"{number}?"), assistant("A A"), user("more?"), assistant("B B")] for number in range(20)]
    asked += [[user(f"{number}?"), assistant("C C C")] for number in range(20)]
    unnamed = opened(tmp_path / "unnamed.jsonl", [{"messages": messages} for messages in asked])
    sides = [{decode(one.tokens).split("?")[0] for one in part.sequences} for part in (unnamed.train, unnamed.held_out)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 20
    assert sum(len(part.sequences) for part in (unnamed.train, unnamed.held_out)) == 60
    named = opened(tmp_path / "named.jsonl", [{"id": n % 4, "messages": m} for n, m in enumerate(asked)])
    sides = [{int(decode(one.tokens).split("?")[0].split("\n")[1]) % 4 for one in part.sequences}
             for part in (named.train, named.held_out)]  # fmt: skip
    assert not sides[0] & sides[1] and sides[0] | sides[1] == {0, 1, 2, 3}


def test_batches_of_a_mixed_file_are_the_same_each_time(tmp_path: Path) -> None:
    """And hold each sequence as it was read, its mask beside it."""
    texts = random_texts(2)
    records: list[Any] = [{"messages": [user(next(texts)), assistant(next(texts), next(texts))]} for _ in range(30)]
    records += [{"text": "The text " + next(texts)} for _ in range(30)]
    records += [{"id": n, "prompt_token_ids": [n] * 3, "token_ids": [7] * (2 + n)} for n in range(30)]
    one, other = (opened(tmp_path / name, records, length=96) for name in ("a.jsonl", "b.jsonl"))
    assert one.sha256 == other.sha256 and one.counts.done == 90
    for step in (5, 0):
        first, second = (data.train.batch(1, step, 4) for data in (one, other))
        for name in ("tokens", "documents", "learned"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    seen = []
    for batch in one.held_out.batches(4):
        for row in range(4):
            tokens, documents, mask = (np.asarray(x)[0, row] for x in (batch.tokens, batch.documents, batch.learned))
            for number in range(documents.max() + 1):
                here = documents == number
                seen.append((tokens[here].tolist(), mask[here].tolist()))
            assert not mask[documents < 0].any()
    assert seen == [(each.tokens.tolist(), each.learned.tolist()) for each in one.held_out.sequences]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: this is not JSON"),
        ("", "line 2: this is not JSON"),
        ("\udcff", "line 2: this is not JSON"),
        ('{"token_ids": [1, 2]}', "line 2: neither a reply of `train.generate_data replies` nor"),
        ('{"id": 1, "prompt_token_ids": [1], "token_ids": ["a", "b"]}', "line 2: token ids must be whole numbers"),
        ('{"messages": ["hello"]}', "line 2: neither a reply"),
        ('{"text": 3}', "line 2: neither a reply"),
        ('{"messages": [{"role": "user", "content": "a"}], "text": "b"}', "line 2: neither a reply"),
        ('{"messages": [{"role": "user", "content": "a"}], "token_ids": [1, 2]}', "line 2: neither a reply"),
        ("[1, 2]", "line 2: neither a reply"),
        ('{"text": "a \\ud83d b"}', "line 2: the text has half of a surrogate pair in it"),
        (
            '{"messages": [{"role": "bard"}, {"role": "user", "content": ""}, {"role": "assistant"}]}',
            "line 2: .*Unknown",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ValueError, match="in.jsonl " + message):
        open_data(reader(path=path))


def test_a_file_with_nothing_left_says_what_became_of_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"leaves no .* of 512 tokens: .* \(2 lines, refused: .*'nothing learned': 1"):
        opened(tmp_path / "in.jsonl", [{"text": "The city of light"}, {"text": ""}])
