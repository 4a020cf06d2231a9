"""Text from tokens as they come, and everything a checkpoint's directory says about replies."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from infer.tokenizer import TextStream, Tokenizer, generation_defaults, stop_ids
from mtp.config import ModelConfig
from tests.infer import small_models

END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = 8183, 8184, 8185, 8186, 8187
TEXTS = (
    "def read_lines(path):\n    return path.read_text().splitlines()\n",
    "Grüße, 你好, שלום, 🙂👩‍👩‍👧 naïve café — x² ≤ y",
    "  spaces\t\ttabs\r\n\n\nend ",
    "one <think>\ninner\n</think> two",
)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return small_models.config()


@pytest.fixture(scope="module")
def tokenizer(config: ModelConfig) -> Tokenizer:
    return Tokenizer.from_pretrained(small_models.demo_file(""), config)


def stream_by(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: object
) -> tuple[TextStream, list[str]]:
    """Pushes the tokens in pieces of these sizes."""
    stream, pieces = TextStream(tokenizer, **options), []
    for size in sizes:
        pieces.append(stream.push(ids[:size]))
        ids = ids[size:]
    return stream, [*pieces, stream.push(ids), stream.finish()]


def test_encode_decode_round_trip(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|im_end|>")[-1] == IM_END
    assert tokenizer.decode([*tokenizer.encode("a"), IM_END]) == "a"


def test_bytes_are_counted_also_through_a_character(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.num_bytes(ids) == len(text.encode())
        parts = [tokenizer.num_bytes(ids[:cut]) + tokenizer.num_bytes(ids[cut:]) for cut in range(len(ids))]
        assert set(parts) == {len(text.encode())}


@pytest.mark.parametrize("text", TEXTS)
def test_stream_shows_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for sizes in ([1] * len(ids), [3] * len(ids), [len(ids)]):
        stream, pieces = stream_by(tokenizer, ids, sizes)
        assert "".join(pieces) == stream.text == text and stream.num_tokens == len(ids)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    # Nothing is held longer than it has to be: each complete character is out with its last token.
    stream = TextStream(tokenizer)
    for count in range(1, len(ids) + 1):
        stream.push(ids[count - 1 : count])
        whole = tokenizer.decode(ids[:count]).rstrip("\N{REPLACEMENT CHARACTER}")
        assert whole.startswith(stream.text) and tokenizer.num_bytes(ids[:count]) - len(stream.text.encode()) < 20


def test_stream_of_any_bytes_equals_decode(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    byte_tokens = [i for i in range(len(tokenizer)) if tokenizer.num_bytes([i]) == 1]
    for _ in range(20):
        ids = rng.choice(byte_tokens, 40).tolist()
        stream, pieces = stream_by(tokenizer, ids, [1] * 40)
        assert "".join(pieces) == stream.text == tokenizer.decode(ids)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_stop_strings_are_never_shown(tokenizer: Tokenizer, size: int) -> None:
    text = TEXTS[0]
    ids = tokenizer.encode(text)
    for stop in ("path", "lines", "):\n", "()", "\n", "text().s", "no such", "def"):
        stream, pieces = stream_by(tokenizer, ids, [size] * len(ids), stop=(stop,))
        place = text.find(stop)
        assert "".join(pieces) == stream.text == (text if place < 0 else text[:place])
        assert stream.stopped == (place >= 0)
        kept = tokenizer.decode(ids[: stream.num_tokens])
        assert kept.startswith(stream.text)
        # no token that lies behind the cut
        assert stream.num_tokens == 0 or len(tokenizer.decode(ids[: stream.num_tokens - 1])) < len(stream.text)


def test_first_of_several_stop_strings_wins(tokenizer: Tokenizer) -> None:
    stream, pieces = stream_by(tokenizer, tokenizer.encode("abc def ghi"), [100], stop=("ghi", "def g", "zzz"))
    assert "".join(pieces) == "abc "


@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_order_of_stop_strings_means_nothing(tokenizer: Tokenizer, size: int) -> None:
    """The one that is complete first cuts the text, though another began before it, whatever the tokens are."""
    ids = tokenizer.encode("wxabcdef")
    for stops, cut in (
        (("ab", "xabc"), "wx"),
        (("abc", "xabc"), "w"),
        (("xab", "ab", "zz"), "w"),
        (("wxabcdef", "cd"), "wxab"),
        (("f", "q"), "wxabcde"),
    ):
        for order in itertools.permutations(stops):
            stream, pieces = stream_by(tokenizer, ids, [size] * len(ids), stop=order)
            assert stream.stopped and "".join(pieces) == stream.text == cut, order
    # also where one token brings both
    text = next(text for i in range(len(tokenizer)) if len(text := tokenizer.decode([i])) == 4 and text.isalpha())
    assert len(tokenizer.encode(text)) == 1
    for order in ((text[1:3], text), (text, text[1:3])):
        stream, pieces = stream_by(tokenizer, tokenizer.encode(text), [1], stop=order)
        assert "".join(pieces) == stream.text == text[:1]


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one, two, three, four")
    commas = [i for i, token in enumerate(ids) if tokenizer.decode([token]) == ","]
    stream, pieces = stream_by(tokenizer, ids, [1] * len(ids), stop=(",",), min_tokens=commas[0] + 1)
    assert "".join(pieces) == "one, two" and stream.num_tokens == commas[1]


def test_stop_ids_come_from_config_generation_config_and_tokenizer(tmp_path: Path, config: ModelConfig) -> None:
    small_models.write(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [THINK, END_OF_TEXT]}))
    found = Tokenizer.from_pretrained(tmp_path / "m", ModelConfig.from_pretrained(tmp_path / "m")).stop_ids
    assert found == (END_OF_TEXT, IM_END, THINK)
    # The 9B has no such file: the end of a chat turn is then the tokenizer's.
    (tmp_path / "m" / "generation_config.json").unlink()
    assert Tokenizer.from_pretrained(tmp_path / "m", config).stop_ids == (END_OF_TEXT, IM_END)
    assert stop_ids(tmp_path / "m", config) == (END_OF_TEXT,)
    assert stop_ids(tmp_path / "m", small_models.config(eos_token_ids=())) == ()


def test_generation_defaults(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert generation_defaults(tmp_path) == {}
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    file.write_text(json.dumps({"do_sample": False}))
    assert generation_defaults(tmp_path) == {"temperature": 0.0}
    file.write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json can't be read"):
        generation_defaults(tmp_path)


def test_inference_F60(tokenizer: Tokenizer) -> None:
    """The thinking toggle goes through the template both ways, and the opening tag is part of the prompt."""
    messages = [{"role": "user", "content": "Hi"}]
    tails = {}
    for thinking in (None, True, False):
        prompt = tokenizer.chat_prompt(messages, thinking)
        assert prompt.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        ids = tokenizer.encode(prompt)
        assert ids[0] == IM_START
        tails[thinking] = ids[-7:]
    assert tails[True] == tails[None]
    assert tails[True][-2] == THINK and END_THINK not in tails[True]
    assert tails[False][-4] == THINK and tails[False][-2] == END_THINK


def test_inference_F60_templates_own_default(tmp_path: Path, config: ModelConfig) -> None:
    """Small releases don't think unless told to: the default is the template's, not ours."""
    small_models.write(tmp_path / "m")
    file = tmp_path / "m" / "chat_template.jinja"
    shown = file.read_text()
    turned = shown.replace(
        "enable_thinking is not defined or enable_thinking", "enable_thinking is defined and enable_thinking"
    )
    assert turned != shown
    file.write_text(turned)
    tokenizer = Tokenizer.from_pretrained(tmp_path / "m", config)
    messages = [{"role": "user", "content": "Hi"}]
    prompts = {option: tokenizer.chat_prompt(messages, option) for option in (None, True, False)}
    assert prompts[None] == prompts[False] != prompts[True]


def test_what_the_template_refuses_is_one_line(tokenizer: Tokenizer) -> None:
    for messages in ([{"role": "system", "content": "x"}], [{"role": "nobody", "content": "x"}], ["text"]):
        with pytest.raises(ValueError, match="the chat template refuses") as error:
            tokenizer.chat_prompt(messages)
        assert "\n" not in str(error.value)


def test_directories_without_a_usable_tokenizer(tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        Tokenizer.from_pretrained(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="the tokenizer can't be read") as error:
        Tokenizer.from_pretrained(tmp_path, config)
    assert "\n" not in str(error.value)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(small_models.demo_file(name), tmp_path / name)
    with pytest.raises(ValueError, match="the tokenizer has 8192 tokens, config.json 100"):
        Tokenizer.from_pretrained(tmp_path, small_models.config(vocab_size=100, eos_token_ids=()))
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_pretrained(tmp_path, config).chat_prompt([{"role": "user", "content": "Hi"}])
