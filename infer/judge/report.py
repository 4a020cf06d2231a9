"""A record as one HTML page: opens offline, on a phone as well, with every figure and the whole record inside.

`page` is pure: a record and the verdicts of its gates go in, text comes out. Plots are inline SVG, drawn by the few
functions at the end; whatever the record lacks is said to be not measured.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape
from typing import Any

from infer.judge.gates import Check

Record = dict[str, Any]
WORKLOADS = ("solo", "team", "busy")
WORDS = {"pass": "passed", "fail": "failed", "undecided": "undecided", "n-a": "not applicable"}

STYLE = """
:root { --ink: #1b1f24; --soft: #5b6470; --line: #d5dae0; --paper: #ffffff; --panel: #f5f7f9; --good: #1a7f4b;
  --bad: #c0362c; --open: #a66300; --one: #2166ac; --two: #b35806; --band: #d9e8d9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4b0; --line: #353c45; --paper: #14171b;
  --panel: #1d2127; --good: #5cc98c; --bad: #ff8a80; --open: #f0b45a; --one: #7db4ea; --two: #f0a35e;
  --band: #24382a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
.verdict { border-left: .5rem solid; padding: .6rem 1rem; background: var(--panel); margin: 1rem 0; }
.score { font-size: 2.6rem; font-weight: 700; line-height: 1.1; }
.pass { color: var(--good); } .fail { color: var(--bad); }
.undecided { color: var(--open); } .n-a { color: var(--soft); }
.banner { background: var(--open); color: #fff; padding: .6rem 1rem; font-weight: 600; margin: 1rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; min-width: 52rem;
  font-size: .92rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: .8rem 0; } svg { display: block; width: 100%; height: auto; max-width: 44rem; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); font-size: 12px; }
pre { overflow: auto; max-height: 30rem; background: var(--panel); padding: .6rem; font-size: .8rem; }
"""


def page(record: Record, checks: Sequence[Check], rule: str) -> str:
    """The whole page.

    Args:
        record: as `infer.judge.record.load` gives it.
        checks: the verdicts, of `infer.judge.gates.check`.
        rule: the one they follow, "reference" or "strict".
    """
    title = f"Judge: {record.get('model', 'a record')}"
    parts = [
        _verdict(record, checks, rule),
        _banner(record),
        _section("Checks", _checks(checks)),
        _section("Intervals", _intervals(record)),
        _section("Workloads", _workloads(record)),
        _section("Acceptance by position", _by_position(record)),
        _section("Tokens a verify step by context length", _by_context(record)),
        _section("How full the pool was (busy)", _fill(record)),
        _section("Speed model", _speed_model(record)),
        _section("Negative controls", _controls(record)),
        _section("One-arm tests", _martingale(record)),
        _section("How to read this page", HOW_TO_READ),
        _section("The whole record", _raw(record)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>{_about(record)}\n" + "\n".join(part for part in parts if part) + "\n</body></html>\n"
    )


HOW_TO_READ = (
    "<p>The <em>stock</em> arm decodes plainly, the <em>candidate</em> drafts and verifies; both have the same "
    "weights, requests and pool. SpecScore is the geometric mean of three workloads' ratios of output tokens a second, "
    "each the median of its passes. A gate of the rule <em>reference</em> fails only if its whole 95 % interval lies "
    "outside the bound; under <em>strict</em> the whole interval must lie inside, and what the sample was too small to "
    "decide is not passed. <em>Power</em> is the chance that a lossless candidate passes with a sample of this size. "
    "Negative controls are candidates that are wrong on purpose: tests that do not catch them prove nothing.</p>"
)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body or NOT_MEASURED}</section>"


NOT_MEASURED = '<p class="soft">Not measured.</p>'


def _about(record: Record) -> str:
    about = record.get("about") or {}
    facts = [record.get("dtype"), about.get("device"), about.get("created"), about.get("commit")]
    facts += [f"{name} {about[name]}" for name in ("jax", "flax") if about.get(name)]
    return f'<p class="soft">{escape(" · ".join(str(fact) for fact in facts if fact))}</p>' if any(facts) else ""


def _verdict(record: Record, checks: Sequence[Check], rule: str) -> str:
    kinds = [check.verdict for check in checks]
    verdict = next((kind for kind in ("fail", "undecided") if kind in kinds), "pass")
    deciding = ", ".join(check.name for check in checks if check.verdict == verdict) if verdict != "pass" else ""
    score = record.get("specscore")
    big = "no score" if score is None else f"{score:.3f}"
    because = f": {escape(deciding)}" if deciding else ""
    clock = record.get("clock", "wall")
    decode = _decode_score(record)
    beside = "" if decode is None else f" By the decode clock it is {decode:.3f}."
    return (
        f'<div class="verdict {verdict}"><div class="score">{big}</div>'
        f"<p><strong>{WORDS[verdict].capitalize()}</strong> under the rule {escape(rule)}{because}.</p>"
        f'<p class="soft">SpecScore by the {escape(str(clock))} clock, first submission to last token.{beside}</p>'
        "</div>"
    )


def _decode_score(record: Record) -> float | None:
    passes = (record.get("raw") or {}).get("passes") or {}
    medians = []
    for name in WORKLOADS:
        ratios = sorted(
            ours / theirs
            for one in passes.get(name) or []
            if (ours := _rate(one["candidate"], "decode")) and (theirs := _rate(one["stock"], "decode"))
        )
        if not ratios:
            return None
        middle = len(ratios) // 2
        medians.append(ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2)
    return math.prod(medians) ** (1 / len(medians))


def _banner(record: Record) -> str:
    synthetic = record.get("synthetic_acceptance")
    random = str(record.get("model", "")).startswith("random:")
    said = []
    if random:
        said.append("Random weights: speed only, the text means nothing.")
    if synthetic:
        lengths = ", ".join(str(x) for x in synthetic)
        said.append(f"Synthetic acceptance ({lengths} tokens a step): drafts stood by chance, right or wrong.")
    return f'<div class="banner">{escape(" ".join(said))}</div>' if said else ""


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        (
            check.name,
            "-" if check.measured is None else f"{check.measured:.5g}",
            check.limit,
            f'<span class="{check.verdict}">{WORDS[check.verdict]}</span>',
            check.reason,
            "" if check.power is None else f"{100 * check.power:.0f} %",
        )
        for check in checks
    ]
    return _table(("check", "measured", "limit", "verdict", "reason", "power"), rows, html_columns={3}, numbers={1, 5})


def _intervals(record: Record) -> str:
    limits = record.get("limits") or {}
    bars: list[tuple[str, float, float, float, float]] = []
    for name, key, bound in (
        ("likelihood", "likelihood", "likelihood_bound"),
        ("first choice", "argmax", "argmax_bound"),
    ):
        found, limit = record.get(key), limits.get(bound)
        if found and limit and found.get("se") is not None:
            bars.append((f"{name}, gap", found["gap"], 1.96 * found["se"], 0.0, limit))
    for name, found in (record.get("lengths") or {}).items():
        limit = limits.get("length_margin")
        if found and limit and found.get("low") is not None:
            half = (found["high"] - found["low"]) / 2
            bars.append((f"length ratio, {name}", found["ratio"], half, 1.0, limit))
    if not bars:
        return ""
    height = 34 * len(bars) + 8
    lines = []
    for row, (name, middle, half, centre, limit) in enumerate(bars):
        y = 34 * row + 22
        reach = max(1.5 * limit, 1.1 * (abs(middle - centre) + half))

        def x(value: float, centre: float = centre, reach: float = reach) -> float:
            return 400 + 220 * (value - centre) / reach

        lines.append(f'<text x="0" y="{y + 4}">{escape(name)}</text>')
        lines.append(
            f'<rect x="{x(centre - limit):.1f}" y="{y - 11}" width="{2 * (x(centre + limit) - 400):.1f}" height="22" '
            f'fill="var(--band)"><title>bound: {centre:g} ± {limit:g}</title></rect>'
        )
        lines.append(
            f'<line x1="{x(middle - half):.1f}" x2="{x(middle + half):.1f}" y1="{y}" y2="{y}" stroke="var(--one)" '
            f'stroke-width="3"><title>{middle:.4f} ± {half:.4f}</title></line>'
            f'<circle cx="{x(middle):.1f}" cy="{y}" r="5" fill="var(--one)"></circle>'
        )
    caption = "95 % intervals (1.96 standard errors) against their bounds, which are shaded."
    return _figure(f'<svg viewBox="0 0 640 {height}" role="img" aria-label="{caption}">{"".join(lines)}</svg>', caption)


def _workloads(record: Record) -> str:
    ratios = record.get("ratios") or {}
    raw = (record.get("raw") or {}).get("passes") or {}
    rows = []
    for name in WORKLOADS:
        if name not in ratios:
            continue
        passes = raw.get(name) or []
        arms = {arm: [one[arm] for one in passes] for arm in ("stock", "candidate")}
        wall = ["-" if not arms[arm] else f"{_mean(_rate(one, 'wall') for one in arms[arm]):,.1f}" for arm in arms]
        floors = [
            one["step_seconds"] / one["floor_seconds"]
            for one in arms["stock"]
            if one["step_seconds"] and one.get("floor_seconds")
        ]
        acceptance = (record.get("acceptance") or {}).get(name)
        rows.append(
            (
                name,
                f"{ratios[name]['ratio']:.3f}",
                ", ".join(f"{one:.3f}" for one in ratios[name]["passes"]),
                "-" if acceptance is None else f"{acceptance:.3f}",
                *wall,
                f"{_mean(floors):.2f}" if floors else "-",
            )
        )
    if not rows:
        return ""
    titles = (
        "workload",
        "speed-up",
        "passes",
        "tokens a verify step",
        "stock tok/s",
        "candidate tok/s",
        "stock step / floor",
    )
    table = _table(titles, rows, numbers={1, 3, 4, 5, 6})
    dots = [(name, ratios[name]["passes"], ratios[name]["ratio"]) for name in WORKLOADS if name in ratios]
    note = (
        "The last column is what a plain step takes over what its bytes take at the memory's speed: a slow baseline "
        "would flatter the ratio."
    )
    return f'{_dots(dots)}{table}<p class="soft">{note}</p>'


def _by_position(record: Record) -> str:
    series = []
    for name, arms in _candidates(record):
        drafted = [sum(column) for column in zip(*(arm["drafted"] for arm in arms), strict=True)]
        accepted = [sum(column) for column in zip(*(arm["accepted"] for arm in arms), strict=True)]
        rates = [(i + 1.0, a / d) for i, (a, d) in enumerate(zip(accepted, drafted, strict=True)) if d]
        if rates:
            series.append((name, rates))
    if not series:
        return ""
    return _lines(series, "position in the window", "share accepted", top=1.0)


def _by_context(record: Record) -> str:
    series = []
    for name, arms in _candidates(record):
        tokens: dict[float, float] = {}
        steps: dict[float, float] = {}
        for one in (bucket for arm in arms for bucket in arm.get("by_context") or []):
            tokens[one["context"]] = tokens.get(one["context"], 0) + one["tokens"]
            steps[one["context"]] = steps.get(one["context"], 0) + one["steps"]
        points = [(math.log2(c), tokens[c] / steps[c]) for c in sorted(tokens) if steps[c]]
        if points:
            series.append((name, points))
    if not series:
        return ""
    return _lines(series, "context up to (tokens)", "tokens a verify step", label=lambda x: f"{2**x:,.0f}")


def _fill(record: Record) -> str:
    series = []
    for number, one in enumerate(((record.get("raw") or {}).get("passes") or {}).get("busy") or []):
        if number == 0:
            series = [(arm, [tuple(point) for point in one[arm].get("fill") or []]) for arm in ("stock", "candidate")]
    series = [(name, points) for name, points in series if len(points) > 1]
    return _lines(series, "seconds (first pass)", "share of the pool in use", top=1.0, marked=False) if series else ""


def _speed_model(record: Record) -> str:
    rows = []
    for name, passes in ((record.get("raw") or {}).get("passes") or {}).items():
        stock = [one["stock"]["step_seconds"] for one in passes if one["stock"].get("step_seconds")]
        candidate = [one["candidate"]["step_seconds"] for one in passes if one["candidate"].get("step_seconds")]
        length = (record.get("acceptance") or {}).get(name)
        if not stock or not candidate or length is None:
            continue
        cost = _mean(candidate) / _mean(stock)
        ratio = record["ratios"][name]["ratio"]
        rows.append(
            (
                name,
                f"{1e3 * _mean(stock):.2f}",
                f"{1e3 * _mean(candidate):.2f}",
                f"{cost:.2f}",
                f"{length:.3f}",
                f"{length / cost:.3f}",
                f"{ratio:.3f}",
            )
        )
    if not rows:
        return ""
    titles = ("workload", "plain step, ms", "speculative step, ms", "cost", "length", "length / cost", "measured")
    note = "Length over cost is the speed-up while every lane decodes; the measured ratio has prefill in it as well."
    return f'{_table(titles, rows, numbers=range(1, 7))}<p class="soft">{note}</p>'


def _controls(record: Record) -> str:
    rows = []
    for one in (record.get("raw") or {}).get("controls") or []:
        caught = [name for name, test in one["tests"].items() if test["caught"]]
        honest = one["name"] == "honest"
        good = one["caught"] != honest
        word = "caught" if one["caught"] else "not caught"
        rows.append(
            (
                one["name"],
                f"{one['strength']:g}",
                f"{one['num_tokens']:,}",
                f'<span class="{"pass" if good else "fail"}">{word}</span>',
                ", ".join(caught) or "-",
            )
        )
    if not rows:
        return ""
    return _table(("candidate", "strength", "tokens", "", "by"), rows, html_columns={3}, numbers={1, 2})


def _martingale(record: Record) -> str:
    rows = []
    for arm, found in ((record.get("raw") or {}).get("martingale") or {}).items():
        for i, slot in enumerate(found["slot"]):
            if not found["num_tokens"][i]:
                continue
            z = [
                found[excess][i] / math.sqrt(found[var][i]) if found[var][i] > 0 else 0.0
                for excess, var in (("sum_log_prob_excess", "var_log_prob"), ("sum_first_excess", "var_first"))
            ]
            rows.append((arm, str(slot), f"{found['num_tokens'][i]:,}", f"{z[0]:+.2f}", f"{z[1]:+.2f}"))
    if not rows:
        return ""
    titles = ("arm", "slot of the window", "tokens", "z of likelihood", "z of first choice")
    return _table(titles, rows, numbers={1, 2, 3, 4})


def _raw(record: Record) -> str:
    text = json.dumps(record, indent=1, allow_nan=False)
    # a list of plain values takes one line
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: "[" + re.sub(r",\n\s*", ", ", found[1]) + "]", text)
    inert = json.dumps(record, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f"<details><summary>JSON, {len(text):,} characters</summary><pre>{escape(text, quote=False)}</pre></details>"
        f'<script type="application/json" id="record">{inert}</script>'
    )


def _candidates(record: Record) -> list[tuple[str, list[Record]]]:
    passes = (record.get("raw") or {}).get("passes") or {}
    return [(name, [one["candidate"] for one in passes[name]]) for name in WORKLOADS if passes.get(name)]


def _rate(arm: Record, clock: str) -> float:
    """Tokens a second; 0 where nothing was timed."""
    seconds = arm.get(f"{clock}_seconds") or 0.0
    return arm[f"{clock}_tokens"] / seconds if seconds else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Collection[int] = (),
    html_columns: Collection[int] = (),
) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        inner = text if tag == "td" and column in html_columns else escape(str(text))
        return f"<{tag}{kind}>{inner}</{tag}>"

    head = "".join(cell("th", i, title) for i, title in enumerate(titles))
    body = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


COLOURS = ("var(--one)", "var(--two)", "var(--good)")


def _dots(rows: Sequence[tuple[str, Sequence[float], float]]) -> str:
    """Passes as dots, their median as a bar, on one axis from 0."""
    top = 1.1 * max(max(values) for _, values, _ in rows)
    height = 36 * len(rows) + 30

    def x(value: float) -> float:
        return 70 + 540 * value / top

    parts = [
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="4" y2="{height - 24}" stroke="var(--soft)" stroke-dasharray="4 3">'
        "</line>",
        f'<text class="soft" x="{x(1):.1f}" y="{height - 8}" text-anchor="middle">1.0: as fast as stock</text>',
    ]
    for row, (name, values, middle) in enumerate(rows):
        y = 36 * row + 22
        parts.append(f'<text x="0" y="{y + 4}">{escape(name)}</text>')
        parts.append(f'<rect x="{x(middle) - 1.5:.1f}" y="{y - 13}" width="3" height="26" fill="var(--two)"></rect>')
        parts += [
            f'<circle cx="{x(value):.1f}" cy="{y}" r="5" fill="var(--one)" fill-opacity="0.7">'
            f"<title>{value:.3f}</title></circle>"
            for value in values
        ]
    caption = "Speed-up of each pass (dots) and their median (bar)."
    return _figure(f'<svg viewBox="0 0 640 {height}" role="img" aria-label="{caption}">{"".join(parts)}</svg>', caption)


def _lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    x_title: str,
    y_title: str,
    *,
    top: float | None = None,
    marked: bool = True,
    label: Callable[[float], str] = lambda x: f"{x:g}",
) -> str:
    """Lines, an axis from 0 to `top`, and a legend; `marked` shows each point, and its x on the axis."""
    xs = sorted({x for _, points in series for x, _ in points})
    low, high = xs[0], xs[-1]
    top = top or 1.15 * max(y for _, points in series for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        return 60 + 560 * ((x - low) / (high - low) if high > low else 0.5), 200 - 170 * y / top

    parts = []
    for tick in range(5):
        value = top * tick / 4
        y = place(low, value)[1]
        parts.append(f'<line x1="60" x2="620" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"></line>')
        parts.append(f'<text class="soft" x="52" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    ticks = xs if marked else [low + (high - low) * i / 5 for i in range(6)]
    for tick in ticks:
        text = label(tick) if marked else f"{tick:.1f}"
        parts.append(f'<text class="soft" x="{place(tick, 0)[0]:.1f}" y="218" text-anchor="middle">{text}</text>')
    for number, (name, points) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{place(x, y)[0]:.1f},{place(x, y)[1]:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"></polyline>')
        if marked:
            parts += [
                f'<circle cx="{place(x, y)[0]:.1f}" cy="{place(x, y)[1]:.1f}" r="4" fill="{colour}">'
                f"<title>{escape(name)}, {label(x)}: {y:.3f}</title></circle>"
                for x, y in points
            ]
        parts.append(f'<rect x="{70 + 110 * number}" y="2" width="12" height="12" fill="{colour}"></rect>')
        parts.append(f'<text x="{88 + 110 * number}" y="13">{escape(name)}</text>')
    parts.append(f'<text class="soft" x="340" y="238" text-anchor="middle">{escape(x_title)}</text>')
    caption = f"{y_title}, against {x_title}"
    return _figure(
        f'<svg viewBox="0 0 640 244" role="img" aria-label="{escape(caption)}">{"".join(parts)}</svg>', caption
    )
