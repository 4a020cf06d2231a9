"""Rules of the house that no single file can show: who imports whom, where disk and clock may be touched, and that
every config file loads, every config field is read, and every public function says what it does.
"""

import ast
import dataclasses
import importlib
import importlib.metadata
import re
import sys
import tomllib
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from mtp.config import ModelConfig, load_toml, preset_names
from mtp.kernels.gated_delta import conv_silu

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mtp", "train", "infer")

# Inside mtp a module imports from the rows above its own, and the kernels from each other.
LAYERS = (
    ("mtp.shapes", "mtp.config", "mtp.sharding"),
    ("mtp.kernels", "mtp.quant"),
    ("mtp.layers", "mtp.cache", "mtp.acceptance"),
    ("mtp.attention", "mtp.gated_deltanet"),
    ("mtp.model",),
    ("mtp.draft_head",),
    ("mtp.weights",),
)
# Beside `train -> mtp <- infer`, one module drives the engine to make training data, under the commands' device flags.
EXCEPTIONS = {("train.generate_data", "infer.engine"), ("train.generate_data", "infer.cli")}

# What reaches the disk, the network, another process or the clock.
IO_MODULES = {
    *("builtins", "datetime", "glob", "http", "importlib", "io", "json", "logging", "os", "pathlib", "pickle"),
    *("random", "requests", "shutil", "socket", "subprocess", "sys", "tempfile", "time", "timeit", "tomllib"),
    *("huggingface_hub", "orbax", "rich", "safetensors", "tokenizers", "tqdm", "transformers", "urllib"),
}
IO_CALLS = {"open", "print", "input"}
JIT = {"jit", "pmap", "shard_map", "pallas_call"}

# Which dataclass a TOML file fills.
TOML_CLASSES = {
    "configs/infer/judge_27b.toml": ("infer.judge.config", "JudgeConfig"),
    "configs/infer/judge_27b_closed.toml": ("infer.judge.config", "JudgeConfig"),
    "configs/infer/judge_demo.toml": ("infer.judge.config", "JudgeConfig"),
    "configs/infer/judge_demo_gpu.toml": ("infer.judge.config", "JudgeConfig"),
    "configs/train/corpus.toml": ("train.corpus", "CorpusConfig"),
    "configs/train/demo.toml": ("train.pretrain", "PretrainConfig"),
    "configs/train/head_demo.toml": ("train.draft_head", "DraftHeadConfig"),
    "configs/train/tiny.toml": ("train.pretrain", "PretrainConfig"),
}


@cache
def modules() -> dict[str, ast.Module]:
    """Parsed source of every module of the packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return found


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports anywhere; `from a import b` gives `a.b` if that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write imports from the package root"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else str(node.module)


def layer_of(name: str) -> int:
    for rank, layer in enumerate(LAYERS):
        if any(name == member or name.startswith(member + ".") for member in layer):
            return rank
    raise AssertionError(f"{name} has no place in LAYERS of {__file__}")


def may_import(importer: str, imported: str) -> bool:
    ours, theirs = importer.split(".")[0], imported.split(".")[0]
    if theirs not in PACKAGES or (importer, imported) in EXCEPTIONS:
        return True
    if ours != theirs:
        return theirs == "mtp"
    if (
        ours != "mtp"
        or imported == "mtp"
        or importer.rpartition(".")[0] == "mtp.kernels" == imported.rpartition(".")[0]
    ):
        return True
    return layer_of(imported) < layer_of(importer)


def test_import_rule() -> None:
    wrong = [
        f"{importer} imports {imported}"
        for importer, tree in modules().items()
        for imported in imports(importer, tree)
        if not may_import(importer, imported)
    ]
    assert not wrong


def test_import_rule_knows_wrong_from_right() -> None:
    right = [("mtp.model", "mtp.attention"), ("train.step", "mtp.model"), ("infer.decode", "mtp.cache")]
    right += [("mtp.weights", "mtp.kernels.sampling"), ("train.generate_data", "infer.engine"), ("mtp.cache", "jax")]
    right += [("mtp.kernels.gated_delta_mgpu", "mtp.kernels.gated_delta"), ("infer.generate", "infer.decode")]
    wrong = [("mtp.attention", "mtp.model"), ("mtp.layers", "mtp.cache"), ("mtp.kernels.sampling", "mtp.layers")]
    wrong += [("mtp.model", "infer.decode"), ("infer.decode", "train.step"), ("train.step", "infer.engine")]
    wrong += [("train.generate_data", "infer.decode"), ("mtp.config", "mtp.shapes"), ("mtp.cache", "mtp.acceptance")]
    assert [pair for pair in right if not may_import(*pair)] == []
    assert [pair for pair in wrong if may_import(*pair)] == []


def test_every_mtp_module_has_its_place() -> None:
    for name in modules():
        if name.startswith("mtp.") and name != "mtp.demo":
            layer_of(name)


def holds_jitted_code(name: str, tree: ast.Module) -> bool:
    if name.startswith("mtp.") and 0 < layer_of(name) < len(LAYERS) - 1:
        return True
    used = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    named = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return not JIT.isdisjoint(used) or not JIT.isdisjoint(named)


def io_in(name: str, tree: ast.Module) -> list[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = [call.id for call in calls if isinstance(call, ast.Name) and call.id in IO_CALLS]
    return found + [module for module in imports(name, tree) if module.split(".")[0] in IO_MODULES]


def test_files_with_jitted_code_do_no_io_and_read_no_clock() -> None:
    jitted = {name: tree for name, tree in modules().items() if holds_jitted_code(name, tree)}
    assert "mtp.model" in jitted
    wrong = {name: found for name, tree in jitted.items() if (found := io_in(name, tree))}
    assert not wrong


def test_io_rule_knows_wrong_from_right() -> None:
    source = "import jax, time\nfrom pathlib import Path\n@jax.jit\ndef f(x):\n    print(x)\n    return open(x)\n"
    tree = ast.parse(source)
    assert holds_jitted_code("infer.decode", tree)
    assert io_in("infer.decode", tree) == ["print", "open", "time", "pathlib"]
    assert not holds_jitted_code("infer.generate", ast.parse("import time\ntime.perf_counter()\n"))


def test_array_types_are_checked_while_testing() -> None:
    rows, weight = jnp.zeros((2, 7, 3), jnp.float32), jnp.zeros((3, 4), jnp.float32)
    assert conv_silu(rows, weight).shape == (2, 4, 3)
    with pytest.raises(TypeCheckError, match=r"parameter 'weight'.*\n.*f32\[4,3\]"):
        conv_silu(rows, weight.T)


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=]", item)[0].lower().replace("_", "-") for item in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    used = {module.split(".")[0] for name, tree in modules().items() for module in imports(name, tree)}
    undeclared = {
        module
        # an extra of a module's name is for that module
        for module in used - sys.stdlib_module_names - set(PACKAGES) - set(project["optional-dependencies"])
        if declared.isdisjoint(owner.lower().replace("_", "-") for owner in owners.get(module, ()))
    }
    assert not undeclared


def test_public_functions_have_docstrings() -> None:
    bare = [name for name, tree in modules().items() if not ast.get_docstring(tree)]
    for name, tree in modules().items():
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        methods = [part for node in classes for part in node.body]
        for node in tree.body + methods:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                bare.append(f"{name}:{node.lineno} {node.name}")
    assert not bare


def toml_class(path: Path) -> type[Any]:
    matches = [target for pattern, target in TOML_CLASSES.items() if path.relative_to(ROOT).match(pattern)]
    assert len(matches) == 1, f"{path.name} must match one pattern of TOML_CLASSES, matches {matches}"
    module, name = matches[0]
    return getattr(importlib.import_module(module), name)


def config_files() -> list[Path]:
    files = (path for path in (ROOT / "configs").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path for path in files if path.name != "__init__.py")


@pytest.mark.parametrize("path", config_files(), ids=lambda path: path.name)
def test_config_file_loads(path: Path) -> None:
    if path.suffix == ".json":
        assert path.parent.name == "model" and path.stem in preset_names()
        ModelConfig.preset(path.stem)
    else:
        load_toml(toml_class(path), path)


def nested_classes(cls: type[Any]) -> Iterator[type[Any]]:
    """A config dataclass and those in its fields, also inside tuples, dicts and optionals."""
    yield cls
    pending = list(typing.get_type_hints(cls).values())
    while pending:
        kind = pending.pop()
        pending += typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            yield from nested_classes(typing.cast(type[Any], kind))


def attributes(node: ast.AST, skip: ast.AST | None = None) -> set[str]:
    """Names of attributes that are read anywhere in `node`, outside `skip`."""
    found, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node is skip:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        pending += ast.iter_child_nodes(node)
    return found


def unread_fields(cls: type[Any]) -> set[str]:
    """Fields that nothing reads: neither code outside the class, nor a method of it that such code uses.

    Checks of a value and writing it out again are no use of it.
    """
    bodies = (node for node in modules()[cls.__module__].body if isinstance(node, ast.ClassDef))
    (body,) = (node for node in bodies if node.name == cls.__name__)
    read = {name for tree in modules().values() for name in attributes(tree, skip=body)}
    methods = {node.name: attributes(node) for node in body.body if isinstance(node, ast.FunctionDef)}
    reached: set[str] = set()
    while new := (methods.keys() & read) - reached - {"from_hf", "to_hf", "tiny"}:
        reached |= new
        read |= set().union(*(methods[name] for name in new))
    return {field.name for field in dataclasses.fields(cls)} - read


@pytest.mark.parametrize(
    "target", [("mtp.config", "ModelConfig"), *sorted(set(TOML_CLASSES.values()))], ids="{0[1]}".format
)
def test_every_config_field_is_read(target: tuple[str, str]) -> None:
    module, name = target
    for cls in nested_classes(getattr(importlib.import_module(module), name)):
        assert not unread_fields(cls), f"nothing reads these fields of {cls.__name__}"


def test_every_toml_reader_is_known_here() -> None:
    """Whatever calls `load_toml` does so with a class of TOML_CLASSES, so that its files and fields are checked."""
    known = {name for _, name in TOML_CLASSES.values()}
    calls = (
        node
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "load_toml"
    )
    used = {ast.unparse(call.args[0]).split(".")[-1] for call in calls}
    assert used == known
