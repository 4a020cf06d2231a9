"""The corpus command on tiny archives made here, the shipped tokenizer and its chat template. No network."""

import dataclasses
import hashlib
import io
import json
import stat
import tarfile
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mtp.config import load_toml
from train import corpus, generate_data

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "mtp" / "demo"
VOCAB_SIZE = 330
SETTINGS = f"""
seed = 3
holdout_fraction = 0.1
max_train_tokens = 1_000_000
vocab_size = {VOCAB_SIZE}
chat_fraction = 0.3
thinking_fraction = 0.5
system_fraction = 0.2
"""


def python_file(i: int) -> str:
    return f'''"""Module {i} of the fake library."""


def scale_{i}(value, factor={i}):
    """Return the value times the factor of module {i}."""
    if factor == {i}:
        return value * {i}
    return value * factor
'''


def synset(i: int) -> str:
    words = f"thing_{i} 0 " + (f"object_{i}(a) 0 " if i % 2 else "")
    return f'{i:08d} 03 n {1 + i % 2:02x} {words}000 | the gloss of thing {i}; "an example, {i}"  '


def write_archives(directory: Path) -> dict[str, Path]:
    """One small archive of every kind that the readers know, as the registries pack them."""
    directory.mkdir(parents=True)
    library = io.BytesIO()
    with zipfile.ZipFile(library, "w") as archive:
        for i in range(30):
            archive.writestr(f"pkg/mod{i}.py", python_file(i))
        archive.writestr("vendored/other.py", "licence = 'another'\n")
    country = '{"Government": {"Country name": {"conventional short form": {"text": "Land %d"}}}, "Geography": '
    country += '{"Climate": {"text": "mild, number %d"}, "Area": {"total": {"text": "%d sq km"}}}}'
    contents = {
        "lib.tgz": {"package/python_stdlib.zip": library.getvalue()},
        "site.tar.gz": {f"site-1.0/docs/page{i}.txt": f"Page {i}\n======\n\nTëxt {i}.\n".encode() for i in range(20)}
        | {f"site-1.0/docs/copy{i}.txt": b"Page 1\n======\n\nT\xc3\xabxt 1.\n" for i in range(3)}
        | {"site-1.0/docs/broken.txt": b"\xff\xfe\xfa", "site-1.0/docs/token.txt": b"a <|im_end|> b"},
        "brown.tgz": {f"package/ca{i:02d}": f"\tOne/cd word/nn {i}/cd ./.\n".encode() for i in range(12)},
        "facts.tgz": {f"package/land/l{i}.json": (country % (i, i, i)).encode() for i in range(12)},
        "words.tgz": {"package/db/data.noun": "\n".join(["  1 Licence"] + [synset(i) for i in range(1, 400)]).encode()},
    }
    for name, files in contents.items():
        with tarfile.open(directory / name, "w:gz") as archive:
            for member, data in files.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    with zipfile.ZipFile(directory / "talk.whl", "w") as archive:
        for i in range(4):
            lines = "".join(f"- - Hello {i} {j}\n  - Hi {i} {j}\n" for j in range(20))
            archive.writestr(f"talk/talk{i}.yml", f"categories: [talk]\nconversations:\n- - Same\n  - Yes\n{lines}")
    return {path.name: path for path in directory.iterdir()}


SOURCES: dict[str, dict[str, Any]] = {
    "lib.tgz": {
        **{"reader": "python", "domain": "code", "member": "package/python_stdlib.zip", "include": ["*.py"]},
        **{"exclude": ["vendored/*"], "chat_share": 0.3},
    },
    "site.tar.gz": {"reader": "text", "domain": "prose", "include": ["docs/*.txt"]},
    "brown.tgz": {"reader": "brown", "domain": "prose", "include": ["package/c[a-r][0-9][0-9]"]},
    "facts.tgz": {"reader": "factbook", "domain": "prose", "include": ["package/*/*.json"], "chat_share": 0.2},
    "words.tgz": {
        **{"reader": "wordnet", "domain": "prose", "include": ["package/db/data.*"]},
        **{"chat_share": 0.3, "keep": 0.5},
    },
    "talk.whl": {"reader": "chatterbot", "domain": "chat", "include": ["talk/*.yml"], "chat_share": 0.2},
}


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of all the fake archives, which lie in `archives` beside it."""
    directory = tmp_path_factory.mktemp("corpus")
    text = SETTINGS
    for name, path in write_archives(directory / "archives").items():
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        text += f'[[archives]]\nname = "{name}"\nregistry = "npm"\npackage = "fake"\nversion = "1"\n'
        text += f'file = "{name}"\nsha256 = "{sha256}"\nlicence = "none"\n'
        text += f'[[sources]]\nname = "{name.partition(".")[0]}"\narchive = "{name}"\n'
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in SOURCES[name].items())
    path = directory / "corpus.toml"
    path.write_text(text)
    return path


def run(config_path: Path, out: Path, *more: str) -> int:
    args = ["--out", str(out), "--tokenizer", str(out / "tokenizer"), "--cache", str(config_path.parent / "archives")]
    return generate_data.main(["corpus", str(config_path), *args, *more])


@pytest.fixture(scope="module")
def built(config_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built")
    assert run(config_path, out) == 0
    return out


def documents(out: Path, name: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    ids = np.fromfile(out / name, np.uint16)
    ends = np.flatnonzero(ids == tokenizer.pad_token_id) + 1
    assert ends[-1] == len(ids)
    return [tokenizer.decode(piece[:-1].tolist()) for piece in np.split(ids, ends[:-1])]


def test_the_same_archives_give_the_same_bytes(
    config_path: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config_path, tmp_path) == 0
    names = sorted(str(path.relative_to(built)) for path in built.rglob("*") if path.is_file())
    assert len(names) == 10
    for name in names:
        assert (tmp_path / name).read_bytes() == (built / name).read_bytes(), name
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert summary.pop("out") == str(tmp_path)
    assert summary.keys() == {"splits", "licences", "sha256", "tokenizer_sha256", "versions"}
    assert summary.items() <= meta.items()


def test_meta_describes_the_token_files(built: Path) -> None:
    meta = json.loads((built / "meta.json").read_text())
    for split, counts in meta["splits"].items():
        texts = documents(built, f"{split}.bin")
        assert counts["documents"] == len(texts)
        assert counts["tokens"] == len(np.fromfile(built / f"{split}.bin", np.uint16))
        assert counts["bytes"] == sum(row["bytes"] for row in counts["sources"].values())
        assert counts["tokens"] == sum(row["tokens"] for row in counts["domains"].values())
    val = np.fromfile(built / "val.bin", np.uint16)
    parts = [np.fromfile(built / f"val_{domain}.bin", np.uint16) for domain in corpus.DOMAINS]
    np.testing.assert_array_equal(val, np.concatenate(parts))
    for row, text in zip(meta["val_documents"], documents(built, "val.bin"), strict=True):
        assert row["bytes"] == len(corpus._CHAT_TOKEN.sub("", text).encode())
    assert [row["start"] for row in meta["val_documents"][1:]] == [
        row["start"] + row["tokens"] for row in meta["val_documents"][:-1]
    ]
    for name, sha256 in meta["sha256"].items():
        assert hashlib.sha256((built / name).read_bytes()).hexdigest() == sha256
    assert np.fromfile(built / "train.bin", np.uint16).max() < VOCAB_SIZE


def test_prompts_are_beginnings_of_held_out_documents(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prompts.jsonl"
    args = ["--tokenizer", str(built / "tokenizer"), "--count", "6", "--tokens", "5"]
    assert generate_data.main(["prompts", str(built), "--out", str(out), *args]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    texts = documents(built, "val.bin")
    assert 0 < len(records) <= 6
    assert len({record["prompt"] for record in records}) > 1
    assert all(any(text.startswith(record["prompt"]) for text in texts) for record in records)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(summary["prompts"].values()) == len(records)


def test_training_prompts_end_where_the_assistant_speaks_or_at_their_length(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    for seed in ("3", "3", "4"):
        out = tmp_path / f"{len(written)}.jsonl"
        args = ["--tokenizer", str(built / "tokenizer"), "--count", "12", "--tokens", "40", "--split", "train"]
        assert generate_data.main(["prompts", str(built), "--out", str(out), *args, "--seed", seed]) == 0
        written.append([json.loads(line)["prompt"] for line in out.read_text().splitlines()])
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompts"] == {"train": len(written[-1])}
    first, again, other = written
    assert first == again and first != other and len(set(first)) == len(first) == 12
    texts = documents(built, "train.bin")
    assert all(any(text.startswith(prompt) for text in texts) for prompt in first)
    asked = [prompt for prompt in first + other if prompt.endswith(generate_data.ASSISTANT)]
    assert asked and all(prompt.count(generate_data.ASSISTANT) == 1 for prompt in asked)
    assert not any(generate_data.ASSISTANT in prompt for prompt in first + other if prompt not in asked)


def test_whole_files_are_held_out(config_path: Path, built: Path) -> None:
    train, val = documents(built, "train.bin"), documents(built, "val.bin")
    assert not set(train) & set(val)
    meta = json.loads((built / "meta.json").read_text())
    plain = {name.partition(".")[0] for name in SOURCES} - {"talk"}
    chats = {f"chat-{name}" for name in ("lib", "facts", "words", "talk")}
    for counts in meta["splits"].values():
        assert set(counts["sources"]) == plain | chats
    # A conversation goes where its file went: no held-out file is named in training, in any form.
    for row, text in zip(meta["val_documents"], val, strict=True):
        if row["source"] == "lib":
            function = text[text.index("scale_") : text.index("(value")]
            assert not any(f"{function}(" in other for other in train)
            assert any(f"{function}(" in other for other in val)
    # This pair stands in all four files of small talk, one of which is held out.
    assert not any("Same<|im_end|>" in text for text in train)
    # Copies, undecodable files and files with control tokens are in neither split; excluded ones are not read.
    everything = "\n".join(train + val)
    assert everything.count("Tëxt 1.\n") == 1
    assert "licence" not in everything and "a <|im_end|> b" not in everything


def test_dialogues_shared_with_a_held_out_file_leave_the_training_files(config_path: Path) -> None:
    config = load_toml(corpus.CorpusConfig, config_path)
    config = dataclasses.replace(config, sources=tuple(item for item in config.sources if item.name == "talk"))
    shared = corpus.Dialogue(("Same", "Yes"), "")
    files = [corpus.SourceFile(f"{i}", "", (shared, corpus.Dialogue((f"{i}", "own"), ""))) for i in range(6)]
    splits = corpus.split_files(config, {"talk": files})
    assert [len(file.dialogues) for file in splits["val"]["talk"]] == [2]
    assert [len(file.dialogues) for file in splits["train"]["talk"]] == [1] * 5


def test_limits_and_shares_are_kept(config_path: Path, built: Path, tmp_path: Path) -> None:
    config = load_toml(corpus.CorpusConfig, config_path)
    counts = json.loads((built / "meta.json").read_text())["splits"]["train"]
    # 10 files of 40 synsets, one held out (the last is short), half of the others kept.
    assert counts["sources"]["words"]["documents"] == round(0.5 * 9)
    chat = counts["domains"]["chat"]["bytes"] / counts["bytes"]
    assert 0.5 * config.chat_fraction < chat < 1.2 * config.chat_fraction
    limit = counts["tokens"] // 3
    assert run(config_path, tmp_path, "--set", f"max_train_tokens={limit}") == 0
    whole, cut = (np.fromfile(path / "train.bin", np.uint16) for path in (built, tmp_path))
    assert 0.8 * limit < len(cut) <= limit
    np.testing.assert_array_equal(cut, whole[: len(cut)])


def test_conversations_think_or_close_the_empty_block(built: Path) -> None:
    chats = [text for text in documents(built, "train.bin") if text.startswith("<|im_start|>")]
    empty = [text for text in chats if "<think>\n\n</think>\n\n" in text]
    assert 0.3 * len(chats) < len(empty) < 0.7 * len(chats)
    for text in chats:
        assert text.count("<think>") == text.count("</think>") == 1
        assert "<think>" in text[text.rindex("<|im_start|>") :]
        assert text.endswith("<|im_end|>\n")
    assert any(text.count("<|im_start|>user") > 1 for text in chats)
    assert any(text.startswith("<|im_start|>system\n") for text in chats)


# Archives


def an_archive(**changes: str) -> corpus.Archive:
    fields = {"name": "a", "registry": "npm", "package": "a", "version": "1", "file": "a-1.tgz", "sha256": "0" * 64}
    return corpus.Archive(**{**fields, "licence": "none", **changes})  # type: ignore[arg-type]


def fake_npm(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    npm = directory / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_a_wrong_hash_is_refused(config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config_path.read_text()
    good = load_toml(corpus.CorpusConfig, config_path).archives[0]
    bad = tmp_path / "corpus.toml"
    bad.write_text(text.replace(good.sha256, "f" * 64))
    (tmp_path / "archives").symlink_to(config_path.parent / "archives")
    assert run(bad, tmp_path / "out") == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert good.file in message and good.sha256 in message and "f" * 64 in message
    assert not (tmp_path / "out" / "train.bin").exists()


def test_what_the_client_brings_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path / "bin", 'printf "%s" "$3" > "$5/a-1.tgz"', monkeypatch)
    sha256 = hashlib.sha256(b"a@1").hexdigest()
    with pytest.raises(ValueError, match=f"sha256 is {sha256}, expected {'0' * 64}"):
        corpus.fetch(an_archive(), tmp_path / "cache")
    assert corpus.fetch(an_archive(sha256=sha256), tmp_path / "cache").read_bytes() == b"a@1"


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo gone >&2; exit 1", "fetching a-1.tgz failed .*gone"), ("exit 0", "npm gave no file a-1.tgz for a 1")],
)
def test_a_failing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    fake_npm(tmp_path / "bin", script, monkeypatch)
    with pytest.raises(RuntimeError, match=message):
        corpus.fetch(an_archive(), tmp_path / "cache")


def test_a_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="npm is needed to fetch a"):
        corpus.fetch(an_archive(), tmp_path / "cache")


@pytest.mark.parametrize(
    ("setting", "message"),
    [("holdout_fraction=0", "holdout_fraction"), ("vocab_size=70000", "uint16"), ("sed=1", "seed")],
)
def test_bad_settings_are_one_line(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert run(config_path, tmp_path, "--set", setting) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_too_little_text_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=8192 asked for"):
        corpus.train_tokenizer(["a few words"], 8192)


def test_the_shipped_config_pins_every_archive() -> None:
    config = load_toml(corpus.CorpusConfig, ROOT / "configs" / "train" / "corpus.toml")
    assert {source.archive for source in config.sources} == {archive.name for archive in config.archives}
    for archive in config.archives:
        assert len(bytes.fromhex(archive.sha256)) == 32 and archive.licence
        assert archive.version in archive.file
    assert sum(source.chat_share for source in config.sources) == pytest.approx(1)
    assert config.vocab_size == 8192


# Readers


def only(files: Any) -> corpus.SourceFile:
    (file,) = files
    return file


def test_brown_reads_as_printed_english() -> None:
    tagged = """

\tThe/at jury/nn said/vbd (/( again/rb )/) ,/, ``/`` Isn't/bez* it/pps so/rb ?/. ?/. ''/''
It/pps cost/vbd $5/nns ;/. ;/.


\tHe/pps saw/vbd and/or/cc heard/vbd ''/'' ./.
"""
    expected = 'The jury said (again), "Isn\'t it so?" It cost $5;\n\nHe saw and/or heard".\n'
    assert only(corpus.read_brown("ca01", tagged)).text == expected


def test_wordnet_reads_as_a_dictionary() -> None:
    lines = [
        "  1 This software and database is being provided to you",
        '00003133 29 v 02 hiccup 0 force_out 4 001 $ 00002942 v 0000 01 + 09 00 | breathe hard; "She hiccuped"  ',
        "00004567 00 s 01 galore(ip) 0 000 | existing in abundance  ",
    ]
    file = only(corpus.read_wordnet("data.verb", "\n".join(lines)))
    assert file.text == (
        'hiccup, force out (verb): breathe hard; "She hiccuped"\ngalore (adjective): existing in abundance\n'
    )
    assert "hiccup" in file.dialogues[0].turns[0]
    assert file.dialogues[0].turns[1].startswith('Hiccup (verb): breathe hard. For example: "She hiccuped".')
    assert file.dialogues[1].turns[1] == "Galore (adjective): existing in abundance."
    assert file.dialogues[1].thought == "The word is galore, an adjective."


def test_factbook_reads_as_sections() -> None:
    page = {
        "Government": {"Country name": {"conventional short form": {"text": "Utopia"}}},
        "Geography": {"Area": {"total": {"text": "5 sq km ++ land: 4"}, "note": {"text": "small"}}},
    }
    file = only(corpus.read_factbook("u.json", json.dumps(page)))
    assert file.text == (
        "Utopia\n\nGovernment\n\nCountry name, conventional short form: Utopia\n\n"
        "Geography\n\nArea, total: 5 sq km; land: 4\nArea, note: small\n"
    )
    (dialogue,) = file.dialogues
    assert "Utopia" in dialogue.turns[0] and "5 sq km; land: 4" in dialogue.turns[1]


def test_functions_and_docstrings_ask_for_each_other() -> None:
    body = '    """Return the sum of both given numbers."""\n    total = a + b\n    return total\n'
    text = "import os\n\x0c\n" + "".join(f"class C{i}:\n  def add_{i}(a, b):\n{body}\n" for i in range(20))
    dialogues = only(corpus.read_python("m.py", text)).dialogues
    assert len(dialogues) == 20
    code = 'def add_{0}(a, b):\n  """Return the sum of both given numbers."""\n  total = a + b\n  return total'
    bare = "def add_{0}(a, b):\n  total = a + b\n  return total"
    writes = 0
    for i, dialogue in enumerate(dialogues):
        question, answer = dialogue.turns
        if f"`add_{i}`" in question:
            writes += 1
            assert answer == f"```python\n{code.format(i)}\n```"
        else:
            assert question.endswith(f"\n\n```python\n{bare.format(i)}\n```")
            assert answer == "Return the sum of both given numbers."
    assert 0 < writes < 20
    assert only(corpus.read_python("broken.py", "def (")).dialogues == ()


# The shipped tokenizer and its chat template


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


def test_special_tokens_end_the_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 8192
    ids = tokenizer.convert_tokens_to_ids(list(corpus.CHAT_TOKENS))
    assert ids == list(range(8192 - len(corpus.CHAT_TOKENS), 8192))
    assert tokenizer("".join(corpus.CHAT_TOKENS))["input_ids"] == ids
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(corpus.MARKUP_TOKENS)
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (DEMO / "tokenizer.json").stat().st_size < 2**20


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    if x:\n        return {'a': [1, 2]}\n\n\n",
        " leading and  double   spaces \t\r\n\r\n  end  ",
        "Ünïcödé: 数学 γειά नमस्ते 👩‍👩‍👧 \u0000 e\u0301 🇩🇪",
        "I'll say it's 3.14159 DON'T",
        "",
    ],
)
def test_decoding_gives_the_text_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert all(0 <= i < 8192 for i in ids)


def test_random_text_survives(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = np.random.default_rng(5)
    planes = np.concatenate([np.arange(1, 0xD800), np.arange(0xE000, 0x20000)])
    texts = ["".join(map(chr, rng.choice(planes, 40))) for _ in range(50)]
    texts += ["".join(rng.choice(list("ab1 \n\t'(=é"), 40)) for _ in range(50)]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == unicodedata.normalize("NFC", text)


def test_text_is_split_as_the_model_family_does(tokenizer: PreTrainedTokenizerBase) -> None:
    def pieces(text: str) -> list[str]:
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in split]

    assert pieces("x = 2024\n") == ["x", " =", " ", "2", "0", "2", "4", "\n"]
    assert pieces("It's THEY'LL (so)") == ["It", "'s", " THEY", "'LL", " (", "so", ")"]
    # A mark without a composed form stays with its letter.
    assert pieces("x\u0338y") == ["x\u0338y"]
    assert pieces("def f():\n        return 1\n\n  \n") == [
        "def",
        " f",
        "():\n",
        "       ",
        " return",
        " ",
        "1",
        "\n\n  \n",
    ]
    assert len(tokenizer("\n        return")["input_ids"]) == 3
    assert len(tokenizer("0123456789")["input_ids"]) == 10


def test_the_qwen_class_agrees(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Beside a config.json of this model type, transformers takes its own class with our vocabulary and merges."""
    for path in DEMO.glob("*"):
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}')
    other = AutoTokenizer.from_pretrained(tmp_path)
    assert type(other).__name__ == "Qwen3_5Tokenizer"
    text = "def f(x):\n    return x * 2024  # it's é, 数学\n<|im_end|>\n<think>\n\n</think>\n\n" * 2
    assert other(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (other.eos_token, other.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    assert other.chat_template == tokenizer.chat_template


def chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


USER = {"role": "user", "content": " Hi "}
HI = "<|im_start|>user\nHi<|im_end|>\n"


def test_the_prompt_thinks_unless_told_not_to(tokenizer: PreTrainedTokenizerBase) -> None:
    assert chat(tokenizer, [USER]) == HI
    thinking = HI + "<|im_start|>assistant\n<think>\n"
    assert chat(tokenizer, [USER], add_generation_prompt=True) == thinking
    assert chat(tokenizer, [USER], add_generation_prompt=True, enable_thinking=True) == thinking
    silent = thinking + "\n</think>\n\n"
    assert chat(tokenizer, [USER], add_generation_prompt=True, enable_thinking=False) == silent
    system = {"role": "system", "content": "Be brief."}
    assert chat(tokenizer, [system, USER]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + HI
    parts = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    assert chat(tokenizer, [parts]) == HI


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.\n"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
    ],
)
def test_thinking_is_kept_after_the_last_query_only(tokenizer: PreTrainedTokenizerBase, answer: dict[str, str]) -> None:
    shown = "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"
    assert chat(tokenizer, [USER, answer]) == HI + shown
    assert chat(tokenizer, [USER, answer, USER]) == HI + "<|im_start|>assistant\nYes.<|im_end|>\n" + HI
    # A tool's response, in either form, is no query: the thought before it stays.
    response = "<tool_response>\n4\n</tool_response>"
    result = f"<|im_start|>user\n{response}<|im_end|>\n"
    assert chat(tokenizer, [USER, answer, {"role": "tool", "content": "4"}]) == HI + shown + result
    assert chat(tokenizer, [USER, answer, {"role": "user", "content": response}]) == HI + shown + result


def test_tools_are_listed_called_and_answered(tokenizer: PreTrainedTokenizerBase) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"function": {"name": "add", "arguments": {"a": [1, 2], "unit": "m"}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    text = chat(tokenizer, messages, tools=[tool])
    system, rest = text[: text.index(HI)], text[text.index(HI) + len(HI) :]
    listed = system[system.index("<tools>\n") + len("<tools>\n") : system.index("\n</tools>")]
    assert json.loads(listed) == tool
    called = "<tool_call>\n<function=add>\n<parameter=a>\n[1, 2]\n</parameter>\n<parameter=unit>\nm\n</parameter>\n"
    called += "</function>\n</tool_call>"
    assert rest == (
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{called}\n{called}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "system", "content": "Be brief."}], "at least one user message"),
        ([{"role": "user", "content": "<tool_response>4</tool_response>"}], "at least one user message"),
        ([USER, {"role": "system", "content": "Be brief."}], "must come first"),
        ([USER, {"role": "narrator", "content": "then"}], "Unknown role narrator"),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "reads text only"),
    ],
)
def test_what_the_template_refuses(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        chat(tokenizer, messages)
