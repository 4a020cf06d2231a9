"""The report: one page that stands alone, says what the gates say, and shows whatever the record has."""

import json
import re
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from infer.judge import gates, record, report
from infer.judge.__main__ import main
from tests.infer.judge import records

REFERENCE = Path(__file__).with_name("reference_record.json")
VOID = {"meta", "br", "hr"}
SECTIONS = ("Checks", "Intervals", "Workloads", "Acceptance by position", "How full the pool was (busy)", "Speed model")


class Page(HTMLParser):
    """Checks that every tag is closed in its turn, and collects text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.words).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page(found: dict[str, Any], rule: str = "strict") -> tuple[str, Page]:
    text = report.page(found, gates.judge(found, rule).checks, rule)
    return text, Page(text)


@pytest.mark.parametrize("rule", ["strict", "reference"])
def test_a_full_record_has_every_section_and_nothing_from_outside(rule: str) -> None:
    found = records.build()
    text, seen = page(found, rule)
    assert seen.addresses == [] and "url(" not in text and "@import" not in text
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    for check in gates.judge(found, rule).checks:
        assert check.name in seen.text
    assert all(section in seen.text for section in SECTIONS) and "Not measured" not in seen.text
    assert f"{found['specscore']:.3f}" in seen.text and f"Passed under the rule {rule}" in seen.text
    assert text.count("<svg") == 5
    assert json.loads(seen.scripts[0]) == found


def test_the_bare_reference_record_says_what_was_not_measured() -> None:
    found = record.load(REFERENCE)
    _, seen = page(found, "reference")
    assert "1.318" in seen.text and "Passed under the rule reference" in seen.text
    assert seen.text.count("Not measured.") == 6
    assert "undecided" in page(found, "strict")[1].text.lower()


def test_an_arm_that_never_ran_full_has_no_step_to_show() -> None:
    raw = deepcopy(records.raw_of(records.build()))
    for one in raw["raw"]["passes"]["busy"]:
        one["stock"] |= {"step_seconds": None, "floor_seconds": 0.01}
    _, seen = page(record.complete(raw))
    assert "stock step / floor" in seen.text


def test_the_verdict_names_the_gate_that_decides() -> None:
    _, seen = page(records.build(likelihood_gap=0.2))
    assert "Failed under the rule strict: likelihood" in seen.text


def test_synthetic_acceptance_and_random_weights_are_said_at_the_top() -> None:
    _, seen = page(records.build(synthetic=True, model="random:27b"))
    banner = seen.text.index("Random weights")
    assert "Synthetic acceptance" in seen.text and banner < seen.text.index("Checks")
    assert "Synthetic acceptance" not in page(records.build())[1].text


def test_hostile_strings_stay_text() -> None:
    found = deepcopy(records.build())
    found["model"] = "</script><script>alert(1)</script>"
    found["about"]["device"] = "<img src=x onerror=alert(1)>"
    text, seen = page(found)
    assert "<script>alert" not in text and "<img" not in text
    assert found["model"] in seen.text and len(seen.scripts) == 1


def test_the_command_writes_the_page_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "r.json"
    source.write_text(REFERENCE.read_text())
    assert main(["report", str(source), "--rule", "reference"]) == 0
    assert Page((tmp_path / "r.html").read_text()).text
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["specscore"] == pytest.approx(1.3182919839229221)
    assert main(["report", str(source), "--out", str(tmp_path / "s.html")]) == 1
    assert (tmp_path / "s.html").is_file()
