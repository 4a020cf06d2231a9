"""A built wheel works outside the clone: configs and the demo model are package data, found from any directory."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the unpacked wheel and nothing else; a pure wheel is installed by unpacking it."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = out.glob("*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_outside_the_clone(site: Path, cwd: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_all_package_data(site: Path) -> None:
    """Everything in the packages that git keeps, and no tests or caches."""
    tracked = {
        path.relative_to(ROOT)
        for package in ("mtp", "train", "infer", "configs")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shipped = {path.relative_to(site) for path in site.rglob("*") if path.is_file()}
    metadata = {path for path in shipped if path.parts[0].endswith(".dist-info")}
    assert shipped - metadata == tracked
    assert any(path.name == "LICENSE" for path in metadata)


def test_presets_load_from_the_wheel(site: Path, tmp_path: Path) -> None:
    # A directory of the same name where the user happens to be must not be taken for ours.
    (tmp_path / "configs" / "model").mkdir(parents=True)
    program = (
        "import mtp.config as c; print(c.__file__); [c.ModelConfig.preset(n) for n in c.preset_names()]; "
        "print(*c.preset_names())"
    )
    file, names = run_outside_the_clone(site, tmp_path, "-c", program).splitlines()
    assert Path(file).is_relative_to(site)
    assert names.split() == sorted(path.stem for path in (ROOT / "configs" / "model").glob("*.json"))


def test_generate_runs_from_the_wheel(site: Path, tmp_path: Path) -> None:
    command = ("-m", "infer.generate", "--model", "demo", "--prompt", "hi", "--max-new-tokens", "4")
    stdout = run_outside_the_clone(site, tmp_path, *command)
    result = json.loads(stdout.splitlines()[-1])
    assert 1 <= len(result["token_ids"]) <= 4
