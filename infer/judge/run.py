"""Measures both arms and writes the record: memory, timed passes, fixed texts, equality, sampled replies, controls.

Everything happens in one process with one set of weights, but for memory, whose peak each arm reaches in a process of
its own. Memory comes first, before this process touches the device, then what is timed, then what is counted.
"""

import argparse
import dataclasses
import datetime
import gc
import importlib.resources
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from infer.cli import provenance, read_text
from infer.engine import Compilations, Engine
from infer.judge import gates, record, selftest, subject, texts, workloads
from infer.judge import plan as planning
from infer.judge import replies as sampling
from infer.judge.config import WORKLOADS, JudgeConfig, Workload
from infer.judge.options import ARMS, STAGES, Options, read_options
from infer.judge.replies import Law, Prompt, seed_of
from infer.judge.selftest import SCORED_LANES, VERIFY
from infer.judge.subject import Subject, engine_of
from infer.judge.texts import Text
from infer.params import SamplingParams
from infer.replies import Reply
from infer.speculative import decode_turn
from mtp.config import load_toml

# What stages fill; None is not measured.
RAW_FIELDS = ("passes", "memory", "texts", "replies", "martingale", "greedy", "coupled", "controls")
# Gates that a growing sample decides.
SAMPLED = ("likelihood", "argmax", *(f"lengths.{name}" for name in WORKLOADS))
# Reply tokens of the requests that warm an engine up, and of the run whose peak memory is taken.
WARM_TOKENS = 16
# Prompts whose replies are drawn before the pilot of a sample is timed.
WARM_UP_PROMPTS = 8

Record = dict[str, Any]


def cache_programs() -> None:
    """Keeps compiled programs on disk, unless jax has been told where, so that the next run compiles nothing again."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "qwen35-mtp" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def run(args: argparse.Namespace) -> tuple[Record, gates.Verdict]:
    """The command `run`: measures, and writes the record and the report. Returns what it wrote and its verdict.

    Raises:
        ValueError, OSError: one line; an option, a file, or shapes that don't work together.
    """
    options = read_options(args)
    cache_programs()
    before = None if args.append is None else record.load(args.append)
    with Display() as display:
        memory = None
        if before is None and "memory" not in options.skip:
            memory = measure_memory(args, display)
        display.stage("loading the weights", 1)
        judged = subject.load(args.model, args.dtype)
        judge = Judge(judged, read_config(args), options, display)
        if before is not None:
            found = judge.append(before)
        else:
            judge.raw["memory"] = memory
            found = judge.all()
    verdict = gates.judge(found, args.rule)
    found |= {"score": verdict.specscore, "reason": verdict.reason}
    out = args.out or args.append or Path("record.json")
    out.write_text(json.dumps(found, allow_nan=False) + "\n", encoding="utf-8")
    if args.report is not None:
        from infer.judge import report

        args.report.write_text(report.page(found, verdict.checks, args.rule), encoding="utf-8")
    return found, verdict


def read_config(args: argparse.Namespace) -> JudgeConfig:
    """The config that was named, or the shipped one for the model and the device. Raises ValueError, OSError."""
    path = args.config
    if path is None:
        name = "27b"
        if args.model == "demo":
            name = "demo" if jax.default_backend() == "cpu" else "demo_gpu"
        path = Path(str(importlib.resources.files("configs") / "infer" / f"judge_{name}.toml"))
    return load_toml(JudgeConfig, path, args.set)


class Display:
    """Which stage is under way and how long it may take, on stderr."""

    def __init__(self) -> None:
        self.console = rich.console.Console(stderr=True, highlight=False)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._task: rich.progress.TaskID | None = None
        self._begun: tuple[str, float] | None = None
        # seconds of each stage, in order
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_stage()
        self._bar.stop()

    def stage(self, name: str, total: float) -> None:
        """Begins a stage; the one before is over."""
        self.end_stage()
        self._begun = (name, time.perf_counter())
        self._task = self._bar.add_task(name, total=total)

    def advance(self, amount: float = 1) -> None:
        """Of the stage's total, so much more is done."""
        if self._task is not None:
            self._bar.advance(self._task, amount)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def end_stage(self) -> None:
        """Says how long the stage took."""
        if self._begun is None or self._task is None:
            return
        name, begun = self._begun
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
        self._bar.remove_task(self._task)
        self.say(f"{self.seconds[name]:7.1f} s  {name}")
        self._begun = self._task = None


# -- memory ------------------------------------------------------------------------------------------------------------


def measure_memory(args: argparse.Namespace, display: Display) -> Record:
    """Peak bytes of each arm, from a short run in its own process; before this one has touched the device.

    Raises:
        ValueError: one line, if such a run fails.
    """
    display.stage("memory", len(ARMS))
    found = {}
    for arm in ARMS:
        command = [sys.executable, "-m", "infer.judge", "memory", "--arm", arm, "--model", args.model]
        command += [] if args.config is None else ["--config", str(args.config)]
        command += [] if args.dtype is None else ["--dtype", args.dtype]
        command += [word for one in args.set for word in ("--set", one)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or "no message").splitlines()[-1].removeprefix("error: ")
            raise ValueError(f"the memory run of the {arm} arm failed: {said}")
        found[arm] = json.loads(done.stdout.splitlines()[-1])
        display.advance()
    return found


def run_memory(args: argparse.Namespace) -> Record:
    """The command `memory`: peak bytes of one arm under the busy workload's settings, and where they come from."""
    cache_programs()
    config = read_config(args)
    judged = subject.load(args.model, args.dtype)
    # the stock arm's process keeps no head
    judged = replace(judged, loaded=judged.arm(args.arm))
    gc.collect()
    return peak_memory(judged, args.arm, config.busy)


def peak_memory(judged: Subject, arm: str, workload: Workload) -> Record:
    """Peak bytes of a short run with every lane busy; where the device does not count them, what the compiler says that
    a turn of decoding takes: arguments, outputs and temporaries."""
    with engine_of(judged, arm, **engine_options(workload, workload.max_length)) as engine:
        device = jax.devices()[0]
        if "peak_bytes_in_use" not in (device.memory_stats() or {}):
            return {"peak_bytes": compiled_bytes(engine), "source": "compiled"}
        rng = np.random.default_rng(0)
        count = (workload.lanes + 1, workload.prompt_tokens)
        prompts = rng.integers(0, judged.law.usable_tokens, count).tolist()
        length = min(WARM_TOKENS, workload.reply_tokens)
        engine.generate(prompts, SamplingParams(**judged.law.sampling, max_tokens=length, ignore_eos=True))
        return {"peak_bytes": int(device.memory_stats()["peak_bytes_in_use"]), "source": "peak_bytes_in_use"}


def compiled_bytes(engine: Engine) -> int:
    """What XLA says that one turn of decoding needs on the device, the weights included."""
    k = engine.num_draft_tokens
    wanted = np.full(engine.gen.status.shape, k, np.int32)
    lowered = decode_turn.lower(
        engine.loaded.model,
        engine.head,
        engine.gen,
        replace(engine.request, num_draft_tokens=wanted),
        np.asarray(engine.gen.cache.page_table),
        np.int32(engine.steps_per_turn),
        num_draft_tokens=k,
        law=engine.law,
        max_steps=engine.steps_per_turn,
        verbs=engine.verbs,
    )
    found = lowered.compile().memory_analysis()
    sizes = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return int(sizes - found.alias_size_in_bytes)


def engine_options(workload: Workload, max_length: int) -> dict[str, Any]:
    """Lanes, pool and pace of a workload, the same for both arms; requests of up to `max_length` tokens, rounded up to
    whole pages.

    Raises:
        ValueError: the pool can't hold one request.
    """
    pages = -(-max_length // workload.page_size)
    if workload.pool_tokens < pages * workload.page_size:
        raise ValueError(f"pool_tokens={workload.pool_tokens} can't hold one request of {max_length} tokens")
    return {
        "num_draft_tokens": workload.num_draft_tokens,
        "max_lanes": workload.lanes,
        "num_pages": workload.pool_tokens // workload.page_size,
        "page_size": workload.page_size,
        "max_length": pages * workload.page_size,
        "steps_per_turn": workload.steps_per_turn,
        "chunk_lengths": workload.chunk_lengths,
        "prefill_lanes": workload.prefill_lanes,
        "verify": VERIFY,
    }


# -- everything else ---------------------------------------------------------------------------------------------------


@dataclass
class Judge:
    """A run under way: stages fill `raw`, of which the record is made."""

    subject: Subject
    config: JudgeConfig
    options: Options
    display: Display
    raw: Record = field(default_factory=lambda: dict.fromkeys(RAW_FIELDS) | {"passes": {}})

    def all(self, about: Record | None = None) -> Record:
        """Every stage that was asked for; of a record that is added to, those that it lacks."""
        wanted = {stage for stage in STAGES if stage not in self.options.skip}
        for name in self.options.workloads if self.options.passes else ():
            self.time_workload(name)
        if "texts" in wanted and self.raw["texts"] is None:
            self.raw["texts"] = self.read_texts()
        if self.natural and "equality" in wanted and self.raw["coupled"] is None:
            greedy = Law({"temperature": 0.0}, self.subject.law.stop_ids, self.subject.law.usable_tokens)
            self.raw["greedy"] = self.compare_equal("greedy equality", greedy, VERIFY)
            self.raw["coupled"] = self.compare_equal("coupled equality", self.subject.law, "coupled")
        if self.natural and "replies" in wanted and self.raw["replies"] is None:
            self.sample_replies()
        if self.options.self_test and self.raw["controls"] is None:
            self.raw["controls"] = self.run_controls()
        return self.record(about)

    def append(self, before: Record) -> Record:
        """The record with more passes and the stages it lacked. Raises ValueError, one line, if it differs."""
        now = self.record()
        for name in ("model", "dtype", "config", "synthetic_acceptance"):
            if before.get(name) != now[name]:
                raise ValueError(f"the record has {name}={_short(before.get(name))}, this run {_short(now[name])}")
        self.raw = before["raw"]
        return self.all(before["about"])

    @property
    def natural(self) -> bool:
        """Whether tokens mean anything."""
        return self.options.acceptance is None and not self.subject.random

    def record(self, about: Record | None = None) -> Record:
        """The record so far, complete."""
        acceptance = self.options.acceptance
        made = {
            "schema": record.SCHEMA,
            "clock": "wall",
            "model": self.subject.name,
            "dtype": self.subject.dtype,
            "config": json.loads(json.dumps(dataclasses.asdict(self.config))),
            "synthetic_acceptance": None if acceptance is None else list(acceptance),
            "about": about or self._about(),
            "limits": record.LIMITS,
            "raw": self.raw,
        }
        return record.complete(made)

    def _about(self) -> Record:
        found = provenance()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return found.pop("versions") | found | {"created": now, "seconds": self.display.seconds}

    def workload(self, name: str) -> Workload:
        """One of the config's."""
        return {"solo": self.config.solo, "team": self.config.team, "busy": self.config.busy}[name]

    def longest(self, workload: Workload) -> int:
        """Tokens of the longest request, timed or sampled: one size for both, so that both run the same programs."""
        if not self.natural:
            return workload.max_length
        sampled = max(len(prompt.token_ids) for prompt in self.prompts("num_prompts", self.config.replies.num_prompts))
        return max(workload.max_length, sampled + self.config.replies.max_tokens)

    # -- timed passes --------------------------------------------------------------------------------------------------

    def time_workload(self, name: str) -> None:
        """Adds passes of one workload; the arms take turns at being first."""
        workload, passes = self.workload(name), self.raw["passes"].setdefault(name, [])
        self.display.stage(f"{name}: {self.options.passes} passes", len(ARMS) * self.options.passes)
        acceptance = self.options.acceptance
        options = engine_options(workload, self.longest(workload))
        if acceptance is not None:
            options["synthetic_acceptance"] = acceptance[WORKLOADS.index(name)]
        stream = self.token_stream(workload.prompt_tokens)
        for number in range(len(passes), len(passes) + self.options.passes):
            seed = seed_of("pass", name, number)
            requests = workloads.make_requests(workload, stream, seed)
            found = {}
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                own = dict(options)
                if arm == "stock":
                    own.pop("synthetic_acceptance", None)
                with engine_of(self.subject, arm, **own) as engine:
                    found[arm] = self.time_arm(engine, workload, requests, seed)
                floor = workloads.plain_floor(self.subject.loaded, workload) if arm == "stock" else None
                found[arm]["floor_seconds"] = floor
                self.display.advance()
            passes.append({arm: found[arm] for arm in ARMS})

    def time_arm(
        self, engine: Engine, workload: Workload, requests: Sequence[workloads.TimedRequest], seed: int
    ) -> Record:
        """Warms an engine up, which is timed apart, and measures it."""
        begun = time.perf_counter()
        engine.warm_up([engine.num_draft_tokens])
        length = min(WARM_TOKENS, workload.reply_tokens)
        warm = SamplingParams(**self.subject.law.sampling, max_tokens=length, ignore_eos=True)
        engine.generate([request.prompt for request in requests[: workload.lanes]], warm)
        compile_seconds = time.perf_counter() - begun
        gc.collect()
        found = workloads.measure(engine, workload, requests, self.subject.law.sampling, seed=seed)
        return found | {"compile_seconds": compile_seconds}

    def token_stream(self, least: int) -> list[int]:
        """What timed prompts are cut from: the texts one after the other, again and again if need be; random tokens for
        random weights."""
        if self.subject.tokenizer is None:
            rng = np.random.default_rng(0)
            return rng.integers(0, self.subject.law.usable_tokens, 4 * least + 10_000).tolist()
        whole = [token for text in self.texts() for token in text.token_ids]
        return whole * -(-2 * least // len(whole))

    # -- texts and equality --------------------------------------------------------------------------------------------

    def texts(self) -> list[Text]:
        """The fixed texts, cut to the config's length."""
        sizes = self.config.texts
        if self.subject.tokenizer is None:
            rng = np.random.default_rng(1)
            drawn = rng.integers(0, self.subject.law.usable_tokens, (sizes.num_texts, sizes.max_tokens))
            return [Text(f"random {number}", tuple(row)) for number, row in enumerate(drawn.tolist())]
        encode = self.subject.tokenizer.encode
        rows = read_rows(self.options.texts, "text", "num_texts", sizes.num_texts)
        return [Text(name, tuple(encode(text)[: sizes.max_tokens])) for name, text in rows]

    def prompts(self, name: str, count: int) -> list[Prompt]:
        """So many of the prompts."""
        assert self.subject.tokenizer is not None
        encode = self.subject.tokenizer.encode
        rows = read_rows(self.options.prompts, "prompt", name, count)
        return [Prompt(prompt_id, tuple(encode(text))) for prompt_id, text in rows]

    def read_texts(self) -> list[Record]:
        """Fixed texts through both arms' paths."""
        chosen, lanes = self.texts(), self.config.texts.lanes
        self.display.stage(f"{len(chosen)} fixed texts", 2)
        stock = texts.read_plainly(self.subject.loaded, chosen, lanes)
        self.display.advance()
        k = self.config.team.num_draft_tokens
        candidate = texts.read_in_windows(self.subject.loaded, chosen, lanes, num_draft_tokens=k, seed=0)
        self.display.advance()
        return texts.compare(chosen, stock, candidate)

    def compare_equal(self, name: str, law: Law, verify: str) -> list[Record]:
        """Replies that both arms have to give alike, and where they part."""
        prompts = self.prompts("num_equal", self.config.replies.num_equal)
        tokens = self.config.replies.max_tokens
        self.display.stage(f"{name}, {len(prompts)} prompts", len(ARMS) * len(prompts) * tokens)
        drawn = {arm: self.draw(arm, "team", prompts, law, 1, ("equal",), verify=verify) for arm in ARMS}
        seeds = [seed_of("equal", prompt.id) for prompt in prompts]
        return sampling.differences(self.subject.loaded, prompts, drawn["stock"], drawn["candidate"], law, seeds)

    # -- sampled replies -----------------------------------------------------------------------------------------------

    def draw(
        self,
        arm: str,
        workload: str,
        prompts: Sequence[Prompt],
        law: Law,
        repetitions: int,
        seed: Sequence[object],
        **changes: Any,
    ) -> list[list[Reply]]:
        """Replies of one arm under a workload's engine settings."""
        longest = max(len(prompt.token_ids) for prompt in prompts) + self.config.replies.max_tokens
        options = engine_options(self.workload(workload), max(longest, self.longest(self.workload(workload))))
        with engine_of(self.subject, arm, **options | changes) as engine:
            return sampling.draw(
                engine,
                prompts,
                law,
                repetitions=repetitions,
                max_tokens=self.config.replies.max_tokens,
                seed=seed,
                progress=self.display.advance,
            )

    def sample_replies(self) -> None:
        """Draws replies by the plan, look by look, until every gate is decided or the budget ends."""
        settings, begun = self.config.replies, time.perf_counter()
        budget = self.options.budget_seconds or settings.budget_seconds
        prompts = self.prompts("num_prompts", settings.num_prompts)
        names = self.options.workloads
        if self.options.rule == "reference":
            plan = planning.fixed(len(prompts), dict.fromkeys(names, settings.repetitions))
        else:
            plan = self.make_plan(prompts, budget, begun)
        self.announce(plan)
        tally = Tally.empty(prompts, names, self.config)
        looks: list[Record] = []
        self.raw["replies"] = {"plan": json.loads(json.dumps(dataclasses.asdict(plan))), "looks": looks}
        for look in range(plan.num_looks):
            tokens = plan.num_tokens or plan.num_replies * settings.max_tokens
            self.display.stage(f"replies, look {look + 1} of {plan.num_looks}", tokens / plan.num_looks)
            self.take_look(tally, prompts, plan.repetitions, ("look", look))
            self.display.end_stage()
            looks.append(tally.clusters_record())
            self.raw["martingale"] = tally.martingale_record()
            verdicts = {one.name: one.verdict for one in gates.check(self.record(), self.options.rule)}
            still_open = [name for name in SAMPLED if verdicts[name] == gates.UNDECIDED]
            seconds = time.perf_counter() - begun
            said = f"undecided: {', '.join(still_open)}" if still_open else "all gates decided"
            self.display.say(f"look {look + 1}: {tally.num_tokens:,} tokens in {seconds:.0f} s; {said}")
            if not still_open:
                break
            if seconds > budget:
                self.display.say(f"the budget of {budget:.0f} s is spent")
                break

    def make_plan(self, prompts: Sequence[Prompt], budget: float, begun: float) -> planning.Plan:
        """The plan of the rule `strict`, from a pilot."""
        settings, names = self.config.replies, self.options.workloads
        total = len(ARMS) * len(names) * len(prompts) * settings.pilot * settings.max_tokens
        self.display.stage("pilot of the replies", total)
        # the first replies trace and compile, and load what is cached: looks do nothing of it again
        longest = sorted(prompts, key=lambda prompt: -len(prompt.token_ids))[:WARM_UP_PROMPTS]
        once = dict.fromkeys(names, 1)
        self.take_look(Tally.empty(longest, names, self.config), longest, once, ("warm-up",))
        pilot = Tally.empty(prompts, names, self.config)
        compiled, begun_drawing = Compilations.seconds, time.perf_counter()
        self.take_look(pilot, prompts, dict.fromkeys(names, settings.pilot), ("pilot",))
        now = time.perf_counter()
        # what texts of another length have compiled
        drawing = now - begun_drawing - (Compilations.seconds - compiled)
        return planning.make_plan(
            pilot.clusters_record(),
            record.LIMITS,
            num_looks=settings.looks,
            tokens_per_second=pilot.num_tokens / drawing,
            budget_tokens=settings.budget_tokens,
            budget_seconds=max(1.0, budget - (now - begun)),
        )

    def take_look(
        self, tally: "Tally", prompts: Sequence[Prompt], repetitions: Mapping[str, int], seed: tuple[object, ...]
    ) -> None:
        """Draws and scores so many replies to each prompt, of each arm under each workload."""
        law = self.subject.law
        for name, count in repetitions.items():
            for arm in ARMS:
                drawn = self.draw(arm, name, prompts, law, count, (arm, name, *seed))
                scores = sampling.score(self.subject.loaded, prompts, drawn, law, SCORED_LANES)
                for place, (own, theirs) in enumerate(zip(drawn, scores, strict=True)):
                    for reply, one in zip(own, theirs, strict=True):
                        tally.clusters[name][arm].add(place, reply, one)
                        tally.martingale[arm].add(reply, one, VERIFY)

    def announce(self, plan: planning.Plan) -> None:
        """What the sample will cost, before it is drawn."""
        self.display.end_stage()
        size = f"{plan.num_replies:,} replies to {plan.num_prompts} prompts in at most {plan.num_looks} looks"
        tokens = "" if plan.num_tokens is None else f", about {plan.num_tokens:,} tokens"
        seconds = "" if plan.seconds is None else f" and {plan.seconds:.0f} s"
        self.display.say(f"sample: {size}{tokens}{seconds}")
        for gate in plan.gates:
            needed = f"needs {gate.repetitions} replies a prompt and workload of each arm"
            self.display.say(f"  {gate.name}: {needed}; power {gate.power:.2f} with what is planned")
        if not plan.within_budget:
            self.display.say("  the budget is smaller than what the gates need: some may stay undecided")

    # -- controls ------------------------------------------------------------------------------------------------------

    def run_controls(self) -> list[Record]:
        """The negative controls and the honest arm, through the same tests."""
        settings = self.config.controls
        prompts = self.prompts("num_prompts", settings.num_prompts)

        def draw(arm: str, law: Law, repetitions: int, seed: Sequence[object], **changes: Any) -> list[list[Reply]]:
            return self.draw(arm, "team", prompts, law, repetitions, seed, **changes)

        self.display.end_stage()
        test = selftest.SelfTest(self.subject, self.config, prompts, self.texts(), draw)
        for line in test.announcement():
            self.display.say(line)
        rows = []
        for control in test.arms:
            self.display.stage(f"control: {control.name}", test.most_tokens(control))
            rows.append(test.run(control))
        return rows


@dataclass
class Tally:
    """Sums of sampled replies: by workload, arm and prompt, and by arm and slot."""

    clusters: dict[str, dict[str, sampling.Clusters]]
    martingale: dict[str, sampling.Martingale]

    @classmethod
    def empty(cls, prompts: Sequence[Prompt], names: Sequence[str], config: JudgeConfig) -> "Tally":
        """Nothing drawn yet."""
        slots = 1 + max(config.solo.num_draft_tokens, config.team.num_draft_tokens, config.busy.num_draft_tokens)
        return cls(
            {name: {arm: sampling.Clusters(prompts) for arm in ARMS} for name in names},
            {arm: sampling.Martingale(slots if arm == "candidate" else 1, seed_of(arm)) for arm in ARMS},
        )

    @property
    def num_tokens(self) -> int:
        """Of both arms, all workloads."""
        return sum(one.num_tokens for arms in self.clusters.values() for one in arms.values())

    def clusters_record(self) -> Record:
        """A look of `raw.replies`."""
        return {name: {arm: one.record() for arm, one in arms.items()} for name, arms in self.clusters.items()}

    def martingale_record(self) -> Record:
        """`raw.martingale`."""
        return {arm: one.record() for arm, one in self.martingale.items()}


def read_rows(path: Path | None, key: str, count_name: str, count: int) -> list[tuple[str, str]]:
    """`count` rows of a JSONL file, spread evenly over it, as (id, text); of the shipped file without a path.

    Raises:
        ValueError: one line; too few rows, or one that lacks the key.
    """
    if path is None:
        path = Path(str(importlib.resources.files("infer.judge") / "data" / f"{key}s.jsonl"))
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append((str(row["id"]), row[key] + ""))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f'{path}:{number} must be an object with "id" and "{key}", a text') from None
    if len({name for name, _ in rows}) < len(rows):
        raise ValueError(f"{path} has an id twice")
    if len(rows) < count:
        raise ValueError(f"{path} has {len(rows)} rows and {count_name}={count} are wanted")
    return [rows[number * len(rows) // count] for number in range(count)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
