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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infer import batch, compare, generate
from infer.engine import Engine
from infer.params import SamplingParams, Task
from infer.replies import Reply
from infer.tokenizer import Tokenizer
from mtp import weights
from tests import oracle
from tests.infer import small_models
from tests.infer.engines import assert_as_new

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def read_lines(path):"
REPLY = 32
MANY = ("--lanes", 4, "--verify", "coupled")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.write(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    """As the command makes it for one such prompt."""
    loaded = weights.load(model, dtype="float32")
    tokenizer = Tokenizer.from_pretrained(model, loaded.config)
    task = Task(tokenizer.encode(PROMPT), SamplingParams(max_tokens=REPLY, num_draft_tokens=3))
    return compare.engine_for(loaded, tokenizer, [task], max_lanes=1, snapshot_memory=0)


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


def task(engine: Engine, **fields: Any) -> Task:
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=REPLY, ignore_eos=True).with_fields(fields)
    return Task(engine.tokenizer.encode(PROMPT), params)


def one(engine: Engine, **fields: Any) -> Reply:
    asked = task(engine, **fields)
    return engine.generate([asked.token_ids], asked.params)[0].reply


def decode(engine: Engine, token_ids: tuple[int, ...]) -> str:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode(token_ids)


def steps_and_accepted(reply: Reply) -> int:
    return reply.num_verify_steps + sum(reply.accepted)


def test_drafts_are_accepted_in_part(engine: Engine) -> None:
    """What the tests below need to mean anything."""
    reply = one(engine)
    assert reply.finish_reason == "length" and len(reply.token_ids) == REPLY
    assert 0 < sum(reply.accepted) < sum(reply.drafted)
    assert steps_and_accepted(reply) == REPLY - 1
    assert len(set(one(engine, num_draft_tokens=0).token_ids)) > REPLY // 2


def test_inference_D43(engine: Engine) -> None:
    """An end token inside an accepted run ends the reply there: each of the first eight tokens in turn."""
    plain = one(engine, num_draft_tokens=0)
    inside = 0
    for n in range(1, 9):
        stop = plain.token_ids[n - 1]
        kept = plain.token_ids.index(stop) + 1
        for k in (0, 3):
            reply = one(engine, num_draft_tokens=k, stop_token_ids=[stop])
            assert reply.token_ids == plain.token_ids[:kept]
            assert reply.finish_reason == "stop"
            assert reply.text == decode(engine, plain.token_ids[:kept])
            # The last step emitted its own token too, unless the cut came before it.
            surplus = steps_and_accepted(reply) - (kept - 1)
            assert surplus in (0, 1)
            inside += surplus
    assert inside > 0


def test_inference_D45(engine: Engine) -> None:
    """A stop string cuts text, ids and counts at the same place, wherever in a window or token it begins or ends."""
    plain = one(engine, num_draft_tokens=0)
    inside = 0
    for start, length in itertools.product(range(0, len(plain.text) // 2, 7), (1, 2, 9)):
        stop = plain.text[start : start + length]
        text = plain.text[: plain.text.index(stop)]
        for k in (0, 3):
            asked = task(engine, num_draft_tokens=k, stop=stop)
            stream = engine.submit(asked.token_ids, asked.params)
            shown = "".join(delta.text for delta in stream)
            reply = stream.result.reply
            assert reply.finish_reason == "stop" and reply.text == text == shown
            kept = len(reply.token_ids)
            assert reply.token_ids == plain.token_ids[:kept]
            assert decode(engine, reply.token_ids).startswith(text)
            assert kept == 0 or len(decode(engine, reply.token_ids[:-1])) < len(text)
            if kept:
                surplus = steps_and_accepted(reply) - (kept - 1)
                assert surplus in (0, 1)
                inside += surplus
    assert inside > 0


def test_streamed_pieces_are_the_text(engine: Engine) -> None:
    pieces: list[str] = []
    sampled = task(engine, temperature=1.0, seed=3, num_draft_tokens=3, verify="rejection")
    outcome = compare.run_tasks(engine, [sampled], show=pieces.append)
    (record,), total = outcome.records, outcome.total
    assert "".join(pieces) == record["text"] == decode(engine, record["token_ids"])
    assert len(pieces) > 1
    assert total["time_to_first_token"] > 0 and total["decode_seconds"] > 0
    # The programs are there: nothing is compiled again.
    assert compare.run_tasks(engine, [task(engine, seed=4)]).total["compile_seconds"] < 0.05
    assert engine.stats.compilations == 0


def test_an_interrupt_leaves_nothing_behind(engine: Engine) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare.run_tasks(engine, [task(engine), task(engine, n=3)], show=interrupt)
    engine.drain()
    assert_as_new(engine)


PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["bare", "penalties"])
def test_a_mismatch_is_found_with_its_margin(engine: Engine, penalties: dict[str, float]) -> None:
    """The margin is recomputed here from the oracle's logits of the same tokens."""
    asked = task(engine, num_draft_tokens=0, **penalties, logit_bias={"7": 3.5, "90": -2.0} if penalties else {})
    plain = one(engine, num_draft_tokens=0, **penalties, logit_bias=asked.params.logit_bias)
    assert compare.mismatch(engine, asked, plain, plain) is None
    changed = (*plain.token_ids[:5], plain.token_ids[5] + 1, *plain.token_ids[6:])
    found = compare.mismatch(engine, asked, replace(plain, token_ids=changed), plain)
    assert found is not None and found.position == 5
    ids = np.array([*asked.token_ids, *plain.token_ids[:5]])
    config, tensors = engine.config.to_hf()["text_config"], weights.to_tensors(engine.loaded)
    logits = oracle.unembed(oracle.trunk(ids, tensors, config)[-1], tensors)
    if penalties:
        seen = np.unique(ids)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.2, logits[seen] * 1.2)
        for token in plain.token_ids[:5]:
            logits[token] -= 0.7
        logits[list(set(plain.token_ids[:5]))] -= 0.3
        logits[7] += 3.5
        logits[90] -= 2.0
    assert int(np.argmax(logits)) == plain.token_ids[5]
    logits = np.sort(logits)
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
            pytest.approx(a / d) if d else None for a, d in zip(part["accepted"], part["drafted"], strict=True)
        ]
        rate = (part["num_tokens"] - 1) / part["decode_seconds"]
        assert part["tokens_per_second"] == pytest.approx(rate) and part["time_to_first_token"] > 0
    assert len(result["drafted"]) == 3 and min(result["drafted"]) > 0 and result["plain"]["drafted"] == [0, 0, 0]
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
    files = ("--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *MANY)
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


def test_a_line_gets_all_that_it_asks_for(cli: Cli, model: Path, tmp_path: Path) -> None:
    """Penalties, bias, log-probabilities, several replies: each does something, and drafting loses nothing of it."""
    # greedy replies of few words, so that they repeat themselves
    words = set(range(200, 216))
    few = {"logit_bias": {str(token): 100 for token in words}}
    lines: list[dict[str, Any]] = [
        few,
        few | {"presence_penalty": 2.0},
        few | {"frequency_penalty": 2.0},
        few | {"repetition_penalty": 3.0},
        {},
        {"logprobs": 2, "max_tokens": 6},
        {"n": 3, "temperature": 1.0, "logprobs": 0, "max_tokens": 6},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"prompt": "a a a"} | line) for line in lines))
    files = ("--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *MANY)
    status, out, err = cli("--model", model, *files, "--max-new-tokens", REPLY, "--compare")
    summary = json.loads(out)
    assert status == 0 and summary["equal"] and summary["num_equal"] == summary["num_replies"] == 9
    assert "The texts are equal" in err
    replies = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(replies) == 7 and all(reply["equal"] and reply["error"] is None for reply in replies)
    *fewer, bare, noted, first = replies
    assert all(set(reply["token_ids"]) <= words and "log_probs" not in reply for reply in fewer)
    assert all(reply["token_ids"] != fewer[0]["token_ids"] for reply in fewer[1:])
    assert not words & set(bare["token_ids"])
    one, best = noted["log_probs"][0], noted["log_probs"][0]["top"]
    assert noted["token_ids"] == bare["token_ids"][:6] and len(noted["log_probs"]) == 6
    assert [one["token"], one["log_prob"]] == best[0] and best[0][1] > best[1][1] and len(best) == 2
    several = [first, *first["others"]]
    assert [reply["sample_index"] for reply in several] == [0, 1, 2]
    assert len({tuple(reply["token_ids"]) for reply in several}) == 3
    assert all(reply["plain"]["token_ids"] == reply["token_ids"] for reply in several)
    assert all(one["top"] == [] for reply in several for one in reply["log_probs"])
    assert summary["num_tokens"] == sum(reply["num_tokens"] for reply in (*replies, *first["others"]))


def test_the_engine_may_choose_k(cli: Cli, model: Path, tmp_path: Path) -> None:
    options = ("--model", model, "--prompt", PROMPT, "--max-new-tokens", REPLY, "--compare", "--json")
    status, out, _ = cli(*options, "--draft-tokens", "auto")
    result = json.loads(out)
    assert status == 0 and result["equal"] and result["num_draft_tokens"] == "auto"
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "num_draft_tokens": "auto"}\n{"prompt": "a"}\n')
    files = ("--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--lanes", 1)
    assert cli("--model", model, *files, "--max-new-tokens", 8)[0] == 0
    first, second = (json.loads(line)["token_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first == second
    # the engine has programs for up to three then
    status, _, err = cli("--model", model, *files, "--max-new-tokens", 8, "--draft-tokens", 5)
    assert status == 2 and err == f"error: {tmp_path}/in.jsonl line 2: num_draft_tokens=5 exceeds the 3 that the " \
        "engine was made for\n"  # fmt: skip


def test_a_reply_without_finite_logits_is_an_error(cli: Cli, model: Path, tmp_path: Path) -> None:
    """The embedding of the fifth token of a reply is NaN: what comes before it stands, other replies are whole."""
    alone = ("--prompt", PROMPT, "--max-new-tokens", REPLY, "--json")
    truth = json.loads(cli("--model", model, *alone)[1])["token_ids"]
    poison = next(token for place, token in enumerate(truth) if place > 3 and token not in truth[:place])
    broken = small_models.write(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][poison] = np.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})

    status, out, err = cli("--model", broken, *alone)
    result = json.loads(out)
    assert status == 1 and result["finish_reason"] == "error"
    count = result["num_tokens"]
    assert result["token_ids"] == truth[:count] and 0 < count <= truth.index(poison) + 1
    assert result["error"] == f"request 0: reply token {count} has no finite logits, or none is allowed"
    assert err == f"error: {result['error']}\n"

    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "Once"}}\n{{"prompt": {json.dumps(PROMPT)}}}\n')
    files = ("--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *MANY)
    status, out, err = cli("--model", broken, *files, "--max-new-tokens", REPLY)
    replies = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert status == 1 and err.startswith(f"error: {tmp_path}/in.jsonl line 2: request 1: reply token")
    assert [reply["finish_reason"] for reply in replies] == ["length", "error"]
    assert replies[0]["num_tokens"] == REPLY and replies[1]["token_ids"] == truth[: replies[1]["num_tokens"]]


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
    "k = many": (["--prompt", "a", "--draft-tokens", "many"], "'many' must be an integer, or auto"),
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
    for more in (("--draft-tokens", 2), ("--draft-tokens", "auto"), ("--compare",)):
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
        ('{"prompt": "a", "allowed": {"transitions": [[0]]}}', "allowed is a table that JSON can't write"),
        ('{"prompt": "a", "logit_bias": {"9000": 1}}', "token id 9000 is outside the vocabulary of 8192"),
        ('{"prompt": "a", "logit_bias": {"five": 1}}', "logit_bias={'five': 1} must map token ids to numbers"),
        ('{"prompt": "a", "n": 0}', "n=0 must be an integer from 1 to 64"),
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


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What is started from a script's background, as these tests may be, inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
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
