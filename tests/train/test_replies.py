"""The target's own answers: every prompt accounted for, and the same lines however the run went."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.infer import small_models
from train import generate_data
from train.replies import Ask, read_asks, regenerate

PROMPTS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "def f(x):", "domain": "code"},
    {"prompt": ""},
    {
        "id": "c",
        "messages": [{"role": "user", "content": "What is a lighthouse?"}, {"role": "assistant", "content": "-"}],
    },
    {"id": "long", "prompt": "word " * 600},
    {"id": "e", "prompt": "The city of"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.write(tmp_path_factory.mktemp("replies") / "model")


@pytest.fixture
def run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on `PROMPTS`; its status, its last line, and what it complained about."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS))

    def one(out: Path, *options: object) -> tuple[int, dict[str, Any], str]:
        command = ["replies", prompts, "--model", model, "--out", out, "--max-tokens", 12, "--lanes", 4, *options]
        status = generate_data.main([str(part) for part in command])
        said = capsys.readouterr()
        return status, json.loads(said.out.splitlines()[-1]) if said.out else {}, said.err

    return one


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_prompts_are_accounted_for(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    status, said, complaints = run(out, "--n", 2, "--temperature", 1.0)
    assert status == 0
    assert (said["done"], said["failed"], said["skipped"], said["total"]) == (3, 0, 2, 5)
    assert "2: the prompt is empty" in complaints and "long: " in complaints
    records = lines(out)
    assert [(record["id"], record["sample"]) for record in records] == [(i, n) for i in "ace" for n in (0, 1)]
    assert records[0]["domain"] == "code" and records[0]["prompt"] == "def f(x):"
    assert records[0]["token_ids"] != records[1]["token_ids"] and records[0]["seed"] == records[1]["seed"]
    # the assistant's last turn is what is drawn anew
    assert records[2]["messages"] == PROMPTS[2]["messages"][:1]
    assert all(0 < len(record["token_ids"]) <= 12 for record in records)
    about = json.loads((tmp_path / "out.jsonl.about.json").read_text())
    assert about["temperature"] == 1.0 and about["n"] == 2 and len(about["template_sha256"]) == 64
    assert said["tokens"] == sum(len(record["token_ids"]) for record in records)


def test_a_stopped_run_ends_with_the_same_file(run: Any, tmp_path: Path) -> None:
    """Cut inside a line or between the two replies to one prompt, and with another number of lanes: the same bytes."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run(whole, "--n", 2, "--temperature", 1.0)
    text = whole.read_bytes()
    # of six lines, three stay: one and a half prompts
    half = sum(len(line) for line in text.splitlines(keepends=True)[:3])
    for cut, resumed, lanes in ((0, 0, 1), (40, 0, 4), (half, 1, 4), (half + 7, 1, 4), (len(text), 3, 4)):
        part.write_bytes(text[:cut])
        (tmp_path / "part.jsonl.about.json").write_bytes((tmp_path / "whole.jsonl.about.json").read_bytes())
        status, said, _ = run(part, "--n", 2, "--temperature", 1.0, "--lanes", lanes)
        assert status == 0 and part.read_bytes() == text
        assert (said["done"], said["resumed"]) == (3, resumed)


def test_another_setting_needs_another_file(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(out)
    before = out.read_bytes()
    # the checkpoint's own default is 0.6
    status, _, complaint = run(out, "--temperature", 0.9)
    assert status == 2 and "was drawn with temperature = 0.6, not 0.9: give another --out" in complaint
    assert out.read_bytes() == before


@dataclass
class FakeStream:
    """A request that is done after so many steps."""

    steps: list[int]
    needed: int
    reply: Any
    result: Any = field(init=False)

    def __post_init__(self) -> None:
        self.result = SimpleNamespace(prompt_token_ids=(1,), replies=(self.reply,))

    @property
    def done(self) -> bool:
        return len(self.steps) >= self.needed


def test_a_failed_reply_is_counted_and_its_prompt_asked_again(tmp_path: Path) -> None:
    """Its neighbours are written, in order; the next run asks for it and nothing else."""
    steps: list[int] = []
    asks = [Ask(str(n), None, "x", {}) for n in range(4)]
    asked: list[str] = []
    broken = {"1"}

    def submit(ask: Ask, seed: int) -> FakeStream:
        asked.append(ask.id)
        bad = ask.id in broken
        reply = SimpleNamespace(
            finish_reason="error" if bad else "stop", error="NaN", token_ids=(7,), text=ask.id, steps=()
        )
        return FakeStream(steps, 3 * (4 - int(ask.id)), reply)

    said: list[str] = []
    options: dict[str, Any] = dict(seed=0, replies_each=1, window=2, complain=said.append)
    counts = regenerate(asks, submit, lambda: steps.append(0), tmp_path / "out", **options)
    assert (counts.done, counts.failed, counts.skipped) == (3, 1, 0) and said == ["1: NaN"]
    assert [record["id"] for record in lines(tmp_path / "out")] == ["0", "2", "3"]
    broken.clear()
    asked.clear()
    counts = regenerate(asks, submit, lambda: steps.append(0), tmp_path / "out", **options)
    assert (counts.done, counts.resumed, counts.failed) == (4, 3, 0) and asked == ["1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: this is not JSON"),
        ('{"text": "a"}', 'line 2: an object with either "prompt" or "messages" is needed'),
        ('{"prompt": "a", "messages": []}', "line 2: an object with either"),
        ('{"id": 1, "prompt": "b"}', "line 2: the id '1' occurs twice"),
        ('{"prompt": 3}', 'line 2: "prompt" is no text'),
        ('{"messages": ["hello"]}', 'line 2: "messages" is no list of'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match="in.jsonl " + message):
        read_asks(path)
