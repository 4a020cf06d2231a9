"""`infer.generate` as a user meets it, and where replies end: text, ids and counts agree whatever ended them.

All runs share a few compiled programs: one lane or four, prompts and replies of the smallest bucket.
"""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer import batch, generate
from infer.batch import BatchGenerator, Reply
from infer.params import SamplingParams
from infer.tokenizer import Tokenizer
from mtp import weights
from tests.infer import small_models

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def read_lines(path):"
REPLY = 32

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.write(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def generator(model: Path) -> BatchGenerator:
    loaded = weights.load(model, dtype="float32")
    return BatchGenerator(loaded, Tokenizer.from_pretrained(model, loaded.config))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command in this process: exit status, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            status = generate.main([str(item) for item in argv])
        except SystemExit as left:
            assert isinstance(left.code, int)
            status = left.code
        return (status, *capsys.readouterr())

    return run


def one(generator: BatchGenerator, **fields: Any) -> Reply:
    params = SamplingParams(max_tokens=REPLY, ignore_eos=True).with_fields(fields)
    (reply,) = generator.run([generator.tokenizer.encode(PROMPT)], params).replies
    return reply


def steps_and_accepted(reply: Reply) -> int:
    return reply.num_verify_steps + sum(reply.accepted)


def test_drafts_are_accepted_in_part(generator: BatchGenerator) -> None:
    """What the tests below need to mean anything."""
    reply = one(generator)
    assert reply.finish_reason == "length" and len(reply.token_ids) == REPLY
    assert 0 < sum(reply.accepted) < sum(reply.drafted)
    assert steps_and_accepted(reply) == REPLY - 1
    assert len(set(one(generator, num_draft_tokens=0).token_ids)) > REPLY // 2


def test_inference_D43(generator: BatchGenerator) -> None:
    """An end token inside an accepted run ends the reply there: each of the first eight tokens in turn."""
    plain = one(generator, num_draft_tokens=0)
    inside = 0
    for n in range(1, 9):
        stop = plain.token_ids[n - 1]
        kept = plain.token_ids.index(stop) + 1
        for k in (0, 3):
            reply = one(generator, num_draft_tokens=k, stop_token_ids=[stop])
            assert reply.token_ids == plain.token_ids[:kept]
            assert reply.finish_reason == "stop"
            assert reply.text == generator.tokenizer.decode(plain.token_ids[:kept])
            # The last step emitted its own token too, unless the cut came before it.
            surplus = steps_and_accepted(reply) - (kept - 1)
            assert surplus in (0, 1)
            inside += surplus
    assert inside > 0


def test_inference_D45(generator: BatchGenerator) -> None:
    """A stop string cuts text, ids and counts at the same place, wherever in a window or token it begins or ends."""
    plain = one(generator, num_draft_tokens=0)
    inside = 0
    for start, length in itertools.product(range(0, len(plain.text) // 2, 7), (1, 2, 9)):
        stop = plain.text[start : start + length]
        text = plain.text[: plain.text.index(stop)]
        for k in (0, 3):
            params = SamplingParams(max_tokens=REPLY, ignore_eos=True, num_draft_tokens=k, stop=(stop,))
            shown: list[tuple[int, str]] = []
            prompts = [generator.tokenizer.encode(PROMPT)]
            (reply,) = generator.run(prompts, params, show=lambda *piece, into=shown: into.append(piece)).replies
            assert reply.finish_reason == "stop" and reply.text == text == "".join(piece for _, piece in shown)
            kept = len(reply.token_ids)
            assert reply.token_ids == plain.token_ids[:kept]
            assert generator.tokenizer.decode(reply.token_ids).startswith(text)
            assert kept == 0 or len(generator.tokenizer.decode(reply.token_ids[:-1])) < len(text)
            if kept:
                surplus = steps_and_accepted(reply) - (kept - 1)
                assert surplus in (0, 1)
                inside += surplus
    assert inside > 0


def test_streamed_pieces_are_the_text(generator: BatchGenerator) -> None:
    pieces: list[str] = []
    params = SamplingParams(max_tokens=REPLY, temperature=1.0, seed=3)
    prompt = generator.tokenizer.encode(PROMPT)
    result = generator.run([prompt], params, show=lambda _, piece: pieces.append(piece))
    (reply,) = result.replies
    assert "".join(pieces) == reply.text == generator.tokenizer.decode(reply.token_ids)
    assert len(pieces) > 1
    assert result.time_to_first_token > 0 and result.decode_seconds > 0
    # The programs are there: nothing is compiled again.
    assert generator.run([prompt], replace(params, seed=4)).compile_seconds < 0.05


def test_replies_do_not_depend_on_their_neighbours(generator: BatchGenerator) -> None:
    """Prompts, lengths, k and settings of their own in one batch, an idle lane beside them: each as if alone."""
    prompts = [generator.tokenizer.encode(text) for text in (PROMPT, "Once upon a time", "x")]
    params = [
        SamplingParams(max_tokens=REPLY),
        SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=5, num_draft_tokens=0),
        SamplingParams(max_tokens=20, temperature=1.1, top_k=40, seed=7, num_draft_tokens=2),
    ]
    together = BatchGenerator(generator.loaded, generator.tokenizer, num_lanes=4).run(prompts, params).replies
    for prompt, p, reply in zip(prompts, params, together, strict=True):
        (alone,) = generator.run([prompt], p, num_draft_tokens=3).replies
        assert reply == alone


def test_a_mismatch_is_found_with_its_margin(generator: BatchGenerator) -> None:
    params = SamplingParams(max_tokens=REPLY, ignore_eos=True, num_draft_tokens=0)
    plain = one(generator, num_draft_tokens=0)
    prompt = generator.tokenizer.encode(PROMPT)
    assert generator.mismatch(prompt, plain, plain, params) is None
    changed = (*plain.token_ids[:5], plain.token_ids[5] + 1, *plain.token_ids[6:])
    found = generator.mismatch(prompt, replace(plain, token_ids=changed), plain, params)
    assert found is not None and found.position == 5
    ids = np.array([*prompt, *plain.token_ids[:5]])
    from tests import oracle

    config, loaded = generator.loaded.config.to_hf()["text_config"], weights.to_tensors(generator.loaded)
    logits = np.sort(oracle.unembed(oracle.trunk(ids, loaded, config)[-1], loaded))
    assert found.margin == pytest.approx(logits[-1] - logits[-2], abs=1e-4) and not found.near_tie


def test_buckets() -> None:
    assert [batch.bucket(n, 32) for n in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]
    for size in (1, 31, 32, 33, 128, 129, 512, 513, 1024, 1500):
        lengths = batch.chunk_lengths(size)
        assert sum(lengths) >= size > sum(lengths[:-1]) and set(lengths) <= set(batch.CHUNK_LENGTHS)
    assert batch.chunk_lengths(0) == []


def test_json_line_and_table(cli: Cli, model: Path) -> None:
    status, out, err = cli("--model", model, "--prompt", PROMPT, "--max-new-tokens", REPLY, "--compare")
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    assert out.startswith(result["text"]) and out.count(json.dumps(result["text"])[1:-1]) >= 2
    for part in (result, result["plain"]):
        assert part["num_tokens"] == len(part["token_ids"]) <= REPLY
        assert part["finish_reason"] in ("stop", "length") and part["seed"] == 0 and part["prompt_tokens"] > 1
        assert part["acceptance_length"] == pytest.approx((part["num_tokens"] - 1) / part["num_verify_steps"])
        assert part["accepted_by_position"] == [
            pytest.approx(a / d) for a, d in zip(part["accepted"], part["drafted"], strict=True)
        ]
        rate = (part["num_tokens"] - 1) / part["decode_seconds"]
        assert part["tokens_per_second"] == pytest.approx(rate) and part["time_to_first_token"] > 0
    assert len(result["accepted_by_position"]) == 3 and result["plain"]["accepted_by_position"] == []
    assert result["equal"] is True and result["equal_expected"] is True and result["mismatch"] is None
    assert result["text"] == result["plain"]["text"]
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain"]["tokens_per_second"])
    assert {"model", "device", "versions", "commit", "dtype", "compile_seconds", "verify"} <= result.keys()
    for word in ("acceptance length", "accepted by position", "time to first token", "tokens a second", "are equal"):
        assert word in err


def test_json_only(cli: Cli, model: Path) -> None:
    status, out, err = cli("--model", model, "--prompt", PROMPT, "--max-new-tokens", 8, "--json")
    assert status == 0 and len(out.splitlines()) == 1 and err == ""
    assert json.loads(out)["num_tokens"] == 8


def test_coupled_sampling_equals_plain_and_rejection_says_that_it_may_differ(cli: Cli, model: Path) -> None:
    sampled = ("--model", model, "--prompt", PROMPT, "--max-new-tokens", REPLY, "--compare", "--seed", 11)
    sampled += ("--temperature", 0.9, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.001)
    status, out, _ = cli(*sampled, "--verify", "coupled")
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and result["equal"] and result["equal_expected"] and result["seed"] == 11
    assert (result["temperature"], result["top_k"], result["top_p"]) == (0.9, 50, 0.95)
    status, out, err = cli(*sampled)
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and not result["equal_expected"] and not result["equal"] and "as they may" in err
    assert result["plain"]["text"] == json.loads(cli(*sampled, "--json")[1])["plain"]["text"]


def test_prompt_sources_agree(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("--model", model, "--max-new-tokens", 4, "--json")
    (tmp_path / "prompt.txt").write_text(PROMPT)
    expected = json.loads(cli(*short, "--prompt", PROMPT)[1])["token_ids"]
    assert json.loads(cli(*short, "--prompt-file", tmp_path / "prompt.txt")[1])["token_ids"] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert json.loads(cli(*short)[1])["token_ids"] == expected


def test_chat_uses_template_and_generation_defaults(cli: Cli, model: Path) -> None:
    short = ("--model", model, "--max-new-tokens", 4, "--json", "--prompt", "Hi")
    think, quiet, chat, plain = (
        json.loads(cli(*short, *more)[1])
        for more in (("--chat", "--thinking"), ("--chat", "--no-thinking"), ("--chat", "--temperature", "0"), ())
    )
    # the two newlines after an empty thought are one token
    assert quiet["prompt_tokens"] == think["prompt_tokens"] + 2
    assert (think["temperature"], think["top_k"], think["top_p"]) == (0.6, 20, 0.95)
    assert (chat["temperature"], chat["top_k"]) == (0.0, 20)
    assert plain["temperature"] == 0.0 and plain["top_k"] == 0 and plain["prompt_tokens"] < 3


def test_stop_option(cli: Cli, model: Path) -> None:
    text = json.loads(cli("--model", model, "--prompt", PROMPT, "--max-new-tokens", REPLY, "--json")[1])["text"]
    stop = text[10:14]
    options = ("--model", model, "--prompt", PROMPT, "--max-new-tokens", REPLY, "--stop", stop, "--stop", "never seen")
    status, out, _ = cli(*options, "--compare")
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and result["equal"] and result["finish_reason"] == "stop"
    assert result["text"] == text[: text.index(stop)] and out.startswith(result["text"] + "\n")


def test_many_prompts(cli: Cli, model: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": PROMPT},
        {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 6},
        {"prompt": "Once", "seed": 4, "temperature": 1.0},
        {"prompt": PROMPT, "max_tokens": 5},
        {"prompt": "last", "num_draft_tokens": 0},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    files = ("--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--lanes", 4)
    status, out, err = cli("--model", model, *files, "--max-new-tokens", REPLY)
    assert status == 0 and len(out.splitlines()) == 1 and "tokens a second" in err
    replies = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(replies) == 5
    alone = json.loads(cli("--model", model, "--prompt", PROMPT, "--max-new-tokens", REPLY, "--json")[1])
    assert replies[0]["token_ids"] == alone["token_ids"] and replies[3]["token_ids"] == alone["token_ids"][:5]
    assert replies[1]["num_tokens"] <= 6 and replies[2]["seed"] == 4 and sum(replies[4]["drafted"]) == 0
    summary = json.loads(out)
    assert summary["num_prompts"] == 5 and summary["seed"] == [0, 4]
    assert summary["num_tokens"] == sum(reply["num_tokens"] for reply in replies)
    assert summary["num_verify_steps"] == sum(reply["num_verify_steps"] for reply in replies)


ERRORS: dict[str, tuple[list[str], str]] = {
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "too long": (["--prompt", "word " * 600], "max_position_embeddings=512"),
    "too long with its reply": (["--prompt", "a", "--max-new-tokens", "512"], "max_position_embeddings=512"),
    "missing directory": (["--model", "no/such/dir", "--prompt", "a"], "no such directory"),
    "missing file": (["--prompt-file", "no_such_file"], "no_such_file"),
    "k = 9": (["--prompt", "a", "--draft-tokens", "9"], "num_draft_tokens=9 must be an integer from 0 to 7"),
    "T = -1": (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be"),
    "top-p = 0": (["--prompt", "a", "--top-p", "0"], "top_p=0.0 must be"),
    "top-k = -3": (["--prompt", "a", "--top-k", "-3"], "top_k=-3 must be"),
    "min-p = 2": (["--prompt", "a", "--min-p", "2"], "min_p=2.0 must be"),
    "no number": (["--prompt", "a", "--temperature", "hot"], "--temperature"),
    "unknown law": (["--prompt", "a", "--verify", "luck"], "luck"),
    "empty stop": (["--prompt", "a", "--stop", ""], "stop="),
    "nothing to say": (["--prompt", "a", "--max-new-tokens", "0"], "max_tokens=0 must be"),
    "compare without drafts": (["--prompt", "a", "--draft-tokens", "0", "--compare"], "--draft-tokens above 0"),
    "thinking without chat": (["--prompt", "a", "--thinking"], "need --chat"),
    "prompts without out": (["--prompts", "x.jsonl"], "--prompts and --out go together"),
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line(cli: Cli, model: Path, case: str) -> None:
    argv, part = ERRORS[case]
    status, out, err = cli("--model", model, *argv)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and part in err


def test_checkpoints_that_lack_something(cli: Cli, tmp_path: Path) -> None:
    bare = small_models.write(tmp_path / "bare", with_tokenizer=False)
    assert cli("--model", bare, "--prompt", "a")[0::2] == (2, f"error: {bare} has no tokenizer (tokenizer.json or "
        "vocab.json); copy its files there\n")  # fmt: skip
    headless = small_models.write(tmp_path / "headless", with_head=False)
    for more in (("--draft-tokens", 2), ("--compare",)):
        status, _, err = cli("--model", headless, "--prompt", "a", *more)
        assert status == 2 and "no mtp.* tensors" in err and err.count("\n") == 1
    status, out, err = cli("--model", headless, "--prompt", "a", "--max-new-tokens", 4)
    assert status == 0 and "has no MTP head: plain decoding" in err
    assert json.loads(out.splitlines()[-1])["num_draft_tokens"] == 0


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "no JSON"),
        ("[1]", 'either "prompt" or "messages"'),
        ('{"text": "a"}', 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": "a", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": "a", "top_p": 0}', "top_p=0 must be"),
        ('{"prompt": "a", "verify": "block"}', "--verify"),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', "the chat template refuses"),
        ('{"prompt": "a", "max_tokens": 999}', "max_position_embeddings=512"),
    ],
)
def test_a_bad_line_is_named(cli: Cli, model: Path, tmp_path: Path, line: str, part: str) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    out_file = tmp_path / "out.jsonl"
    status, out, err = cli("--model", model, "--prompts", tmp_path / "in.jsonl", "--out", out_file)
    assert status == 2 and out == "" and not out_file.exists()
    assert "in.jsonl line 3: " in err and part in err and err.count("\n") == 1


def test_mistakes_are_answered_before_anything_is_loaded() -> None:
    program = (
        "import sys; from infer.generate import main; status = main(['--prompt', 'a', '--temperature', '-1']); "
        "sys.exit(0 if status == 2 and 'jax' not in sys.modules else 1)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True).returncode == 0


def test_ctrl_c_stops_cleanly(tmp_path: Path) -> None:
    model = small_models.write(tmp_path / "long", max_position_embeddings=8192)
    command = [sys.executable, "-m", "infer.generate", "--model", str(model), "--prompt", PROMPT]
    command += ["--max-new-tokens", "8000", "--draft-tokens", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as run:
        assert run.stdout is not None
        first = run.stdout.read(1)
        run.send_signal(signal.SIGINT)
        rest, err = run.communicate(timeout=120)
    assert run.returncode == 130
    assert first and b"{" not in (first + rest).splitlines()[-1]
    assert err.strip() == b"interrupted"
