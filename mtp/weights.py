"""Checkpoints: one table from Hugging Face names to our parameters, for loading, checking and writing.

In goes a directory, a hub id or "demo"; out come `Qwen35`, `MTPHead` and a `Report` of what was read. The
table is read off the modules on abstract shapes, so it is right at every size without a weight in memory.
Tensors go from disk to the device one by one, and all that is wrong with a checkpoint is said at once.

    python -m mtp.weights inspect demo
    python -m mtp.weights verify Qwen/Qwen3.5-27B
    python -m mtp.weights export DIR --out OTHER --dtype float32
    python -m mtp.weights export --head runs/head_demo --into DIR --out OTHER
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import importlib.resources
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import rich.console
import rich.progress
import rich.table
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mtp import quant
from mtp.config import ModelConfig
from mtp.draft_head import MTPHead, probe_logits
from mtp.model import Qwen35
from mtp.sharding import param_sharding

COMPOSITE, TEXT = "model.language_model.", "model."
LAYOUTS = {"composite": COMPOSITE, "text": TEXT}
VISION, HEAD, UNEMBED, SCALE = "model.visual.", "mtp.", "lm_head.weight", "_scale_inv"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Of a head that is added to a checkpoint without one.
HEAD_SHARD = "model-mtp.safetensors"
# What a checkpoint holds besides its weights: config, tokenizer, chat template, generation defaults, licence.
SIDE_FILES = ("*.json", "*.txt", "*.jinja", "LICENSE*")

FP8 = "F8_E4M3"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    FP8: np.dtype(ml_dtypes.float8_e4m3fn),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHOWN = 40

StatePath = tuple[Any, ...]  # attribute names and list indices, as nnx.to_flat_state gives them


class CheckpointError(ValueError):
    """A checkpoint cannot be used. `complaints` has every problem, the message the first 40 of them."""

    def __init__(self, *complaints: str, source: str | None = None):
        self.complaints = complaints
        if source is None and len(complaints) == 1:
            super().__init__(complaints[0])
            return
        lines = [f"{source or 'checkpoint'}: {len(complaints)} problem{'s' * (len(complaints) > 1)}"]
        lines += [f"  {complaint}" for complaint in complaints[:_SHOWN]]
        lines += [f"  ... and {len(complaints) - _SHOWN} more"] if len(complaints) > _SHOWN else []
        super().__init__("\n".join(lines))


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint: `source` itself, the demo inside this package, or a snapshot of the hub.

    Args:
      source: a directory, "demo", or a hub id such as "Qwen/Qwen3.5-27B" (an existing directory comes first).
      revision: branch, tag or commit; for hub ids only.

    Raises:
      CheckpointError: one line that names what is missing and what to do.
    """
    path = Path(source).expanduser()
    if str(source) == "demo":
        path = Path(str(importlib.resources.files("mtp") / "demo"))
    elif not path.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(source)):
        return _from_hub(str(source), revision)
    if revision is not None:
        raise CheckpointError(f"revision {revision!r} applies to hub ids, and {source} is not one; leave it out")
    if not path.exists():
        raise CheckpointError(f"{source}: no such directory; give a checkpoint directory, a hub id or 'demo'")
    if not path.is_dir():
        raise CheckpointError(f"{source} is a file; give the directory that holds config.json and the weights")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json; give the directory of a Hugging Face checkpoint")
    return path


def _from_hub(repo_id: str, revision: str | None) -> Path:
    # Only here: the import takes a while, and directories do not need it.
    import huggingface_hub
    from huggingface_hub import errors

    what = repo_id if revision is None else f"{repo_id} at revision {revision}"
    try:
        path = huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=["*.safetensors", *SIDE_FILES]
        )
    except errors.IncompleteSnapshotError:
        raise CheckpointError(f"{what}: the download in the hub cache is incomplete; run again online") from None
    except errors.LocalEntryNotFoundError:
        raise CheckpointError(
            f"{what}: no such directory, not in the hub cache, and the hub cannot be reached; "
            "go online (unset HF_HUB_OFFLINE) or give a directory"
        ) from None
    # Whatever else the client may meet: a private repository, a proxy, a full disk.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{what}: no such directory, and the hub says: {reason}") from None
    if not (Path(path) / "config.json").is_file():
        raise CheckpointError(f"{what} has no config.json; give the id of a Hugging Face checkpoint")
    return Path(path)


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor as stored, not read yet."""

    dtype: str  # as safetensors spells it: BF16, F16, F32, F8_E4M3, ...
    shape: tuple[int, ...]
    nbytes: int
    place: tuple[Path, int] | np.ndarray  # file and offset in bytes, or the array itself

    @classmethod
    def in_memory(cls, array: np.ndarray) -> Self:
        """A tensor that is in memory already."""
        return cls(DTYPE_NAMES.get(array.dtype, str(array.dtype)), array.shape, array.nbytes, array)

    def read_bytes(self) -> np.ndarray:
        """Fresh bytes [nbytes] uint8; nothing else holds on to them."""
        if isinstance(self.place, np.ndarray):
            return np.array(self.place, order="C").reshape(-1).view(np.uint8)
        path, offset = self.place
        return np.fromfile(path, np.uint8, self.nbytes, offset=offset)

    def read(self) -> np.ndarray:
        """The tensor; `dtype` must be one of `DTYPES`."""
        return self.read_bytes().view(DTYPES[self.dtype]).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Files:
    """Every tensor of a checkpoint by name, from the file headers alone."""

    tensors: dict[str, Stored]
    block: tuple[int, int] = (128, 128)  # rows and columns that share a scale in an fp8 checkpoint
    unreadable: frozenset[str] = frozenset()  # names that the index promises from files that are missing or broken
    complaints: tuple[str, ...] = ()


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file.

    Raises:
      CheckpointError: if the file is cut short or is no safetensors file.
    """
    mend = "download or copy it again"
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull`")
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path} is cut short or no safetensors file ({size} bytes); {mend}")
        text = file.read(length)
    try:
        header = {key: value for key, value in json.loads(text).items() if key != "__metadata__"}
        tensors = {key: _stored(value, path, 8 + length) for key, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} has a broken safetensors header; {mend}") from None
    end = max((8 + length, *(value["data_offsets"][1] + 8 + length for value in header.values())))
    if size < end:
        raise CheckpointError(f"{path} is cut short: {size} bytes, its header promises {end}; {mend}")
    return tensors


def _stored(value: dict[str, Any], path: Path, base: int) -> Stored:
    begin, end = value["data_offsets"]
    stored = Stored(value["dtype"], tuple(value["shape"]), end - begin, (path, base + begin))
    itemsize = DTYPES[stored.dtype].itemsize if stored.dtype in DTYPES else None
    if begin < 0 or end < begin or (itemsize and stored.nbytes != itemsize * math.prod(stored.shape)):
        raise ValueError
    return stored


def read_files(directory: str | Path) -> Files:
    """All tensors of a checkpoint directory: one safetensors file, or shards of any names through an index.

    Reads headers only. What is wrong with single shards is kept as complaints.

    Raises:
      CheckpointError: if it is unclear which files make up the checkpoint, there are none, or the only one is broken.
    """
    directory = Path(directory)
    names, weight_map = _file_names(directory)
    tensors: dict[str, Stored] = {}
    unreadable: set[str] = set()
    complaints: list[str] = []
    for name in names:
        promised = {key for key, file in weight_map.items() if file == name}
        try:
            header = read_header(directory / name)
        except FileNotFoundError:
            complaints.append(f"{directory / name} is missing, and {INDEX} lists it; download or copy it again")
            unreadable |= promised
            continue
        except (CheckpointError, OSError) as error:
            if not weight_map:
                raise
            complaints.append(str(error))
            unreadable |= promised
            continue
        if weight_map:
            complaints += [f"{key}: {INDEX} says it is in {name}, and it is not" for key in promised - header.keys()]
            complaints += [f"{key}: is in {name}, but not in {INDEX}" for key in header.keys() - weight_map.keys()]
            header = {key: stored for key, stored in header.items() if key in promised}
        tensors |= header
    return Files(tensors, _block(directory), frozenset(unreadable), tuple(sorted(complaints)))


def _file_names(directory: Path) -> tuple[list[str], dict[str, str]]:
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    if not (directory / INDEX).is_file():
        if SINGLE in present or len(present) == 1:
            return [SINGLE if SINGLE in present else present[0]], {}
        if present:
            raise CheckpointError(f"{directory}: {len(present)} .safetensors files and no {INDEX}; add the index")
        raise CheckpointError(f"{directory} has no .safetensors file; give a checkpoint with safetensors weights")
    try:
        weight_map = dict(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(weight_map.values()))
        paths = [directory / name for name in names]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{directory / INDEX} is not a safetensors index; download or copy it again") from None
    if directory / SINGLE not in paths and SINGLE in present:
        raise CheckpointError(f"{directory} has both {SINGLE} and an {INDEX} that does not list it; remove one")
    return names, weight_map


def _block(directory: Path) -> tuple[int, int]:
    # a head may come alone
    if not (directory / "config.json").is_file():
        return Files.block
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    both = (raw, raw.get("text_config") or {})
    found = [part["quantization_config"] for part in both if part.get("quantization_config")]
    rows, columns = found[0]["weight_block_size"] if found else Files.block
    return int(rows), int(columns)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter: how the file names and shapes it, and where and as what it lives here."""

    key: str  # Hugging Face name
    path: StatePath  # in the state of `Qwen35`, or of `MTPHead` if `key` starts with "mtp."
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]  # axis names, for sharding

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Table:
    """Every parameter of a config, and the abstract modules the entries were read off."""

    entries: dict[str, Entry]
    model: Qwen35
    head: MTPHead | None  # None if the config has no MTP layer

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, config: ModelConfig, dtype: np.dtype[Any] = DTYPES["BF16"], prefix: str = COMPOSITE) -> Self:
        """The table of `config`, whose text keys start with `prefix`; allocates nothing, at any size."""
        model = nnx.eval_shape(lambda: Qwen35(config, nnx.Rngs(0), dtype))
        head = nnx.eval_shape(lambda: MTPHead(config, nnx.Rngs(0), dtype)) if config.num_mtp_layers else None
        entries = [_entry(path, param, prefix) for path, param in nnx.to_flat_state(nnx.state(model))]
        if head is not None:
            entries += [_entry(path, param, HEAD) for path, param in nnx.to_flat_state(nnx.state(head))]
        return cls({entry.key: entry for entry in entries}, model, head)


def _entry(path: StatePath, param: nnx.Variable, prefix: str) -> Entry:
    name = ".".join(map(str, path))
    key = name if name == UNEMBED else prefix + name
    shape = tuple(param.shape)
    # The one transform: the depthwise convolution is [C, 1, W] in the file and [C, W] here.
    file_shape = (shape[0], 1, shape[1]) if name.endswith("conv1d.weight") else shape
    return Entry(key, path, file_shape, shape, np.dtype(param.dtype), tuple(param.axes))


@dataclasses.dataclass(frozen=True)
class Binding:
    """A parameter and the tensor it is read from."""

    entry: Entry
    stored: Stored
    scales: Stored | None  # of an fp8 tensor


@dataclasses.dataclass(frozen=True)
class Plan:
    """A table laid over a checkpoint: what to read for which parameter, and all that does not fit."""

    table: Table
    prefix: str
    bindings: tuple[Binding, ...]  # in the order of the files
    has_head: bool
    vision: tuple[str, ...]  # names of the skipped vision tensors
    block: tuple[int, int]
    complaints: tuple[str, ...]


def make_plan(config: ModelConfig, files: Files, dtype: DTypeLike = jnp.bfloat16) -> Plan:
    """Matches each tensor with one parameter and each parameter with one tensor; collects what is left."""
    tensors = {key: stored for key, stored in files.tensors.items() if not key.startswith(VISION)}
    vision = tuple(sorted(files.tensors.keys() - tensors.keys()))
    prefix, general = _find_prefix(tensors.keys() | files.unreadable)
    table = Table.of(config, jnp.dtype(dtype), prefix)
    complaints = []

    has_head = any(key.startswith(HEAD) for key in tensors.keys() | files.unreadable)
    wanted = {key: entry for key, entry in table.entries.items() if has_head or not key.startswith(HEAD)}
    if config.tie_word_embeddings and UNEMBED in tensors:
        complaints += _check_tied(tensors.pop(UNEMBED), tensors.get(prefix + "embed_tokens.weight"))

    scales = {key: stored for key, stored in tensors.items() if key.endswith(SCALE)}
    weights = {key: stored for key, stored in tensors.items() if key not in scales}
    complaints += [f"{key}: missing" for key in wanted if key not in weights.keys() | files.unreadable]
    for key in weights.keys() - wanted.keys():
        no_head = key.startswith(HEAD) and not config.num_mtp_layers
        complaints.append(f"{key}: unexpected" + " (config.json says mtp_num_hidden_layers = 0)" * no_head)
    bindings = []
    for key in wanted.keys() & weights.keys():
        binding = Binding(wanted[key], weights[key], scales.pop(key + SCALE, None))
        complaints += _check_binding(binding, files)
        bindings.append(binding)
    for key in scales:
        owner = key.removesuffix(SCALE)
        # The weight of an unexpected or unreadable name has its own complaint.
        if owner not in weights.keys() | files.unreadable:
            complaints.append(f"{key}: scale companion left over, there is no {owner}")
    bindings.sort(key=lambda binding: _location(binding.stored))
    return Plan(
        table=table,
        prefix=prefix,
        bindings=tuple(bindings),
        has_head=has_head and table.head is not None,
        vision=vision,
        block=files.block,
        complaints=(*files.complaints, *general, *sorted(complaints)),
    )


def _find_prefix(keys: Iterable[str]) -> tuple[str, list[str]]:
    """The prefix of the text keys, and a complaint if it is none of ours or not the only one."""
    trunk = re.compile(r"^((?!mtp\.).*?)(?:embed_tokens\.|layers\.\d+\.|norm\.weight$)")
    found = {match[1] for key in keys if (match := trunk.match(key))}
    known = [prefix for prefix in (COMPOSITE, TEXT) if prefix in found]
    if len(known) == 1 and len(found) == 1:
        return known[0], []
    names = ", ".join(repr(prefix) for prefix in sorted(found)) or "none"
    return (known or [COMPOSITE])[0], [
        f"text tensors under prefix {names}; one of {COMPOSITE!r} and {TEXT!r} is needed: rename or drop it"
    ]


def _check_tied(unembed: Stored, embed: Stored | None) -> list[str]:
    if embed is None or (
        (unembed.dtype, unembed.shape) == (embed.dtype, embed.shape)
        and np.array_equal(unembed.read_bytes(), embed.read_bytes())
    ):
        return []
    return [f"{UNEMBED}: differs from embed_tokens.weight, and config.json says tie_word_embeddings; drop either"]


def _check_binding(binding: Binding, files: Files) -> list[str]:
    entry, stored, scales = binding.entry, binding.stored, binding.scales
    key, complaints = entry.key, []
    if stored.shape != entry.file_shape:
        complaints.append(f"{key}: has shape {list(stored.shape)}, config.json asks for {list(entry.file_shape)}")
    if stored.dtype not in DTYPES:
        complaints.append(f"{key}: dtype {stored.dtype} is not supported; supported: {', '.join(DTYPES)}")
    if stored.dtype == FP8 and scales is None and key + SCALE not in files.unreadable:
        complaints.append(f"{key}: fp8 without its {SCALE[1:]} companion; without scales the values mean nothing")
    if scales is None:
        return complaints
    if stored.dtype != FP8:
        complaints.append(f"{key}{SCALE}: scale companion left over, {key} is {stored.dtype}")
    elif scales.dtype not in DTYPES or scales.dtype == FP8:
        complaints.append(f"{key}{SCALE}: scales of dtype {scales.dtype} are not supported; supported: F32, F16, BF16")
    elif len(stored.shape) != 2:
        complaints.append(f"{key}: fp8 blocks need two axes, shape is {list(stored.shape)}")
    elif scales.shape != (expected := quant.scale_shape(stored.shape, files.block)):
        complaints.append(
            f"{key}{SCALE}: has shape {list(scales.shape)}, blocks of {list(files.block)} ask for {list(expected)}"
        )
    return complaints


def _location(stored: Stored) -> tuple[str, int]:
    return ("", 0) if isinstance(stored.place, np.ndarray) else (str(stored.place[0]), stored.place[1])


@dataclasses.dataclass(frozen=True)
class Report:
    """What was read from where."""

    source: str = "memory"
    prefix: str = COMPOSITE  # of the text keys
    parameters: int = 0
    tensors_read: int = 0  # scales not counted
    bytes_read: int = 0  # scales counted
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)  # tensors by stored dtype
    dequantised: int = 0
    vision_skipped: int = 0
    has_head: bool = True

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line for people."""
        dtypes = ", ".join(f"{count} x {dtype}" for dtype, count in sorted(self.dtypes.items()))
        quantised = f", {self.dequantised} dequantised" if self.dequantised else ""
        return [
            ("source", self.source),
            ("text prefix", self.prefix),
            ("parameters", f"{self.parameters:,}"),
            ("tensors read", f"{self.tensors_read} ({dtypes}{quantised})"),
            ("bytes read", f"{self.bytes_read:,}"),
            ("vision tensors skipped", str(self.vision_skipped)),
            (
                "MTP head",
                "loaded" if self.has_head else "none in this checkpoint: plain decoding only, k must be 0",
            ),
        ]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory."""

    config: ModelConfig
    model: Qwen35
    head: MTPHead | None  # None if the checkpoint has no `mtp.*`: plain decoding only
    report: Report = Report()


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """Loads a checkpoint, one tensor at a time from disk to the device.

    Args:
      source, revision: as for `resolve`.
      dtype: of the parameters; `A_log` and `linear_attn.norm` are float32 regardless.
      mesh: where the parameters go, by the axes they carry; the default device if None.
      progress: called after each tensor with the bytes read and the bytes to read.

    Raises:
      CheckpointError: with every complaint about the checkpoint, or one line if it cannot be found.
      ValueError: from `ModelConfig`, if `config.json` asks for something this code lacks.
    """
    directory = resolve(source, revision)
    config = ModelConfig.from_pretrained(directory)
    return _load(config, read_files(directory), str(source), dtype, mesh, progress)


def from_tensors(config: ModelConfig, tensors: Mapping[str, np.ndarray], dtype: DTypeLike = jnp.bfloat16) -> Loaded:
    """As `load`, from Hugging Face names and arrays in memory; values are copied.

    Raises:
      CheckpointError: as `load`.
    """
    files = Files({key: Stored.in_memory(array) for key, array in tensors.items()})
    return _load(config, files, "memory", dtype, None, None)


def _load(
    config: ModelConfig,
    files: Files,
    source: str,
    dtype: DTypeLike,
    mesh: Mesh | None,
    progress: Callable[[int, int], None] | None,
) -> Loaded:
    plan = make_plan(config, files, dtype)
    if plan.complaints:
        raise CheckpointError(*plan.complaints, source=source)
    sizes = [binding.stored.nbytes + (binding.scales.nbytes if binding.scales else 0) for binding in plan.bindings]
    values: dict[str, jax.Array] = {}
    done = 0
    for binding, size in zip(plan.bindings, sizes, strict=True):
        values[binding.entry.key] = _place(binding, plan.block, mesh)
        # jax drops its reference to a host buffer that it has copied at the next garbage collection, not before.
        gc.collect(0)
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    entries = [binding.entry for binding in plan.bindings]
    report = Report(
        source=source,
        prefix=plan.prefix,
        parameters=sum(entry.size for entry in entries),
        tensors_read=len(entries),
        bytes_read=sum(sizes),
        dtypes=dict(Counter(binding.stored.dtype for binding in plan.bindings)),
        dequantised=sum(binding.scales is not None for binding in plan.bindings),
        vision_skipped=len(plan.vision),
        has_head=plan.has_head,
    )
    trunk = {entry.path: values[entry.key] for entry in entries if not entry.key.startswith(HEAD)}
    draft = {entry.path: values[entry.key] for entry in entries if entry.key.startswith(HEAD)}
    head = _fill(plan.table.head, draft) if plan.has_head and plan.table.head is not None else None
    return Loaded(config, _fill(plan.table.model, trunk), head, report)


def _place(binding: Binding, block: tuple[int, int], mesh: Mesh | None) -> jax.Array:
    """Reads one tensor, puts it on the device and converts it there, so that the host never holds another."""
    entry = binding.entry
    spread = None if mesh is None else param_sharding(mesh, entry.axes, entry.shape)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    value = jax.device_put(binding.stored.read().reshape(entry.shape), spread)
    if binding.scales is not None:
        scales = jax.device_put(binding.scales.read(), everywhere)
        value = jax.device_put(quant.dequantise(value, scales, block=block, dtype=entry.dtype), spread)
    # Waiting lets go of the host buffer before the next one is read.
    return jax.block_until_ready(value.astype(entry.dtype))


def _fill[M: nnx.Module](module: M, values: Mapping[StatePath, jax.Array]) -> M:
    graph, state = nnx.split(module)
    filled = [(path, param.replace(values[path])) for path, param in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor to be written; `get` fetches its bytes only then."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    get: Callable[[], np.ndarray]

    @classmethod
    def of(cls, key: str, stored: Stored) -> Self:
        """The tensor as it is stored elsewhere."""
        return cls(key, stored.dtype, stored.shape, stored.nbytes, stored.read_bytes)


def to_tensors(loaded: Loaded, layout: str = "composite") -> dict[str, np.ndarray]:
    """Hugging Face names and host arrays of a loaded model: the inverse of `from_tensors`."""
    pieces = _pieces(loaded, LAYOUTS[layout])
    return {piece.key: piece.get().view(DTYPES[piece.dtype]).reshape(piece.shape) for piece in pieces}


def export(
    loaded: Loaded,
    out_dir: str | Path,
    *,
    like: str | Path | None = None,
    layout: str | None = None,
    shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes a checkpoint under the published names; `load` gets the same bits back.

    The directory appears whole or not at all, and transformers reads it. Values are written as they are in
    memory, so what was fp8 is written dequantised. A head that was not loaded is not written.

    Args:
      loaded: what to write.
      out_dir: must not exist or be empty.
      like: the checkpoint this one descends from, as for `resolve`. Its `config.json` and tokenizer files are
        taken over and, in the composite layout, its vision tensors.
      layout: "composite" (`model.language_model.*`, nested config) or "text" (`model.*`, flat config);
        the one that was read if None.
      shard_bytes: most bytes of tensors in a file; a larger tensor has a file to itself.

    Returns:
      `out_dir`.

    Raises:
      CheckpointError: if `out_dir` is in use, `like` is another model, or a parameter has not the shape that
        the config asks for.
    """
    out_dir = Path(out_dir).absolute()
    _check_free(out_dir)
    prefix = loaded.report.prefix if layout is None else LAYOUTS[layout]
    pieces = _pieces(loaded, prefix)
    parent = None if like is None else resolve(like)
    if parent is not None and ModelConfig.from_pretrained(parent) != loaded.config:
        raise CheckpointError(f"{like} is not like this model: its config.json says something else")
    if parent is not None and prefix == COMPOSITE:
        tensors = read_files(parent).tensors
        pieces += [_Piece.of(key, stored) for key, stored in tensors.items() if key.startswith(VISION)]

    with _appearing(out_dir) as draft:
        _write_tensors(pieces, draft, shard_bytes)
        _write_json(_config_json(loaded, prefix, parent), draft / "config.json")
        if parent is not None:
            _copy_side_files(parent, draft)
    return out_dir


@contextlib.contextmanager
def _appearing(out_dir: Path) -> Iterator[Path]:
    """A directory to write into: it becomes `out_dir` at the end, or vanishes with the error."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    draft = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.partial")
    draft.mkdir()
    try:
        yield draft
        draft.replace(out_dir)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_free(out_dir: Path) -> None:
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise CheckpointError(f"{out_dir} exists and is not empty; give a new directory")


def _copy_side_files(source: Path, target: Path) -> None:
    for file in (file for pattern in SIDE_FILES for file in source.glob(pattern)):
        if file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)


def _pieces(loaded: Loaded, prefix: str) -> list[_Piece]:
    if loaded.model.layers[0].mlp.gate_up_proj is not None:
        raise CheckpointError("the model's maps are stacked for decoding: load the checkpoint again to export it")
    table = Table.of(loaded.config, prefix=prefix)
    values = {("", *path): param for path, param in nnx.to_flat_state(nnx.state(loaded.model))}
    if loaded.head is not None:
        values |= {(HEAD, *path): param for path, param in nnx.to_flat_state(nnx.state(loaded.head))}
    pieces, complaints = [], []
    for key, entry in table.entries.items():
        part = HEAD if key.startswith(HEAD) else ""
        if part and loaded.head is None:
            continue
        param = values.pop((part, *entry.path), None)
        if param is None:
            complaints.append(f"{key}: missing")
        elif tuple(param.shape) != entry.shape:
            complaints.append(f"{key}: has shape {list(param.shape)}, the config asks for {list(entry.shape)}")
        else:
            nbytes, dtype = entry.size * param.dtype.itemsize, DTYPE_NAMES[np.dtype(param.dtype)]
            pieces.append(_Piece(key, dtype, entry.file_shape, nbytes, functools.partial(_host_bytes, param)))
    complaints += [f"{'.'.join(map(str, path)).lstrip('.')}: unexpected" for path in values]
    if complaints:
        raise CheckpointError(*complaints, source="the model to export")
    return pieces


def _host_bytes(param: nnx.Variable) -> np.ndarray:
    return np.ascontiguousarray(param[...]).reshape(-1).view(np.uint8)


def _write_tensors(pieces: list[_Piece], directory: Path, shard_bytes: int) -> None:
    shards: list[list[_Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + piece.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(piece)
    count = len(shards)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        _write_file(shard, directory / name)
        weight_map |= {piece.key: name for piece in shard}
    _write_index(weight_map, sum(piece.nbytes for piece in pieces), directory)


def _write_index(weight_map: Mapping[str, str], total_size: int, directory: Path) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(index, directory / INDEX)


def _write_file(pieces: list[_Piece], path: Path) -> None:
    # Wide types first keeps every tensor aligned to its own width, which torch asks for.
    pieces = sorted(pieces, key=lambda piece: -(piece.nbytes // max(math.prod(piece.shape), 1)))
    # transformers refuses files that do not say this.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        header[piece.key] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            piece.get().tofile(file)
        file.flush()
        os.fsync(file.fileno())


def _config_json(loaded: Loaded, prefix: str, parent: Path | None) -> dict[str, Any]:
    outer = loaded.config.to_hf()
    if parent is not None:
        original = json.loads((parent / "config.json").read_text(encoding="utf-8"))
        outer = original if "text_config" in original else outer | {"text_config": original}
    # What is written is not quantised, and of the dtype that is in memory.
    stale = ("quantization_config", "dtype", "torch_dtype")
    text = {key: value for key, value in outer["text_config"].items() if key not in (*stale, "architectures")}
    text |= {"model_type": "qwen3_5_text", "dtype": str(loaded.model.embed_tokens.weight.dtype)}
    if prefix == COMPOSITE:
        return {key: value for key, value in outer.items() if key not in stale} | {"text_config": text}
    tie = {"tie_word_embeddings": loaded.config.tie_word_embeddings}
    return {"architectures": ["Qwen3_5ForCausalLM"]} | text | tie


def export_head(head: str | Path, into: str | Path, out_dir: str | Path, *, revision: str | None = None) -> list[str]:
    """Writes the checkpoint `into` anew with a trained head in the place of its own.

    Names, files and dtypes stay those of `into`; a matrix in block-scaled fp8 is quantised again, in the same blocks.
    Shards without `mtp.*` are hard-linked (copied where that cannot be), everything else is copied byte for byte. A
    checkpoint without a head gets a shard more, in the dtype of its embedding, and an index and config that tell of it.
    What was written is read again and compared, the head's logits too, before the directory appears.

    Args:
      head: a directory with `mtp.*` tensors in safetensors files; or that of a `train.draft_head` run or of its
        checkpoints, whose best (or newest) head is taken.
      into, revision: as for `resolve`.
      out_dir: must not exist or be empty, nor lie in `into`.

    Returns:
      The names of the shards that were written.

    Raises:
      CheckpointError: one line: `out_dir` is in use, `into` cannot take a head, the head is not one of this model, or
        what was written does not read back.
    """
    directory, out_dir = resolve(into, revision), Path(out_dir).absolute()
    _check_free(out_dir)
    if out_dir.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{out_dir} lies inside {into}, which is left as it is; give a directory elsewhere")
    files, config = read_files(directory), ModelConfig.from_pretrained(directory)
    with_head = dataclasses.replace(config, num_mtp_layers=1)
    plan = make_plan(with_head, files)
    if plan.complaints:
        _refuse(into, plan.complaints, "`python -m mtp.weights verify` lists everything")
    if not plan.has_head and any(stored.dtype == FP8 for stored in files.tensors.values()):
        raise CheckpointError(f"{into} is quantised and has no head to go by; give the release that is not quantised")
    new = {key: Stored.in_memory(value) for key, value in _as_stored(_read_head(Path(head), with_head), plan).items()}
    with _appearing(out_dir) as draft:
        if not config.num_mtp_layers:
            raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            raw.get("text_config", raw)["mtp_num_hidden_layers"] = 1
            _write_json(raw, draft / "config.json")
        written = _write_head(new, files, draft)
        # After all writing: what is linked must not be written to.
        for file in directory.iterdir():
            if file.is_file() and not (draft / file.name).exists():
                _link(file, draft / file.name)
        _check_written(files.tensors | new, written, draft)
        _check_logits(Files(new, plan.block), draft)
    return written


def _refuse(source: str | Path, complaints: Iterable[str], mend: str) -> None:
    first, *others = complaints
    raise CheckpointError(f"{source}: {first}{f' (and {len(others)} more)' if others else ''}; {mend}")


def _read_head(path: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Float32 values of a head of this model, by published name."""
    mend = "give a directory with mtp.* tensors of this model, or a run of train.draft_head"
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; {mend}")
    if any(path.glob("*.safetensors")):
        if (path / "config.json").is_file():
            _check_same_model(path, config)
        files = read_files(path)
    else:
        files = Files({key: Stored.in_memory(value) for key, value in _restore_head(path, mend).items()})
    plan = make_plan(config, files, jnp.float32)
    # Of the trunk nothing is needed.
    complaints = [text for text in plan.complaints if text.startswith(HEAD)]
    if any(key.startswith(HEAD) for key in files.unreadable):
        complaints += files.complaints
    if not plan.has_head:
        complaints = ["no mtp.* tensors"]
    if complaints:
        _refuse(path, complaints, mend)
    return {entry.key: np.asarray(value) for entry, value in _head_values(plan).items()}


def _check_same_model(path: Path, config: ModelConfig) -> None:
    theirs = ModelConfig.from_pretrained(path)
    # The rest says nothing about the head.
    kept = {"num_mtp_layers", "eos_token_ids", "max_position_embeddings"}
    for name in (field.name for field in dataclasses.fields(config) if field.name not in kept):
        ours, other = getattr(config, name), getattr(theirs, name)
        if ours != other:
            raise CheckpointError(f"{path} is the head of another model: {name} is {other}, {ours} is needed")


def _restore_head(path: Path, mend: str) -> dict[str, np.ndarray]:
    """From an orbax checkpoint of `train.draft_head`: without its optimizer, and without the classes of its state."""
    # Only here: the import takes a while, and safetensors do not need it.
    import orbax.checkpoint as ocp

    place = path / "best" if (path / "best").is_dir() else path
    steps = [int(step.name) for step in place.iterdir() if step.name.isdigit() and (step / "state").is_dir()]
    if not steps:
        raise CheckpointError(f"{path} has neither .safetensors files nor a checkpoint of a run; {mend}")
    state = (place / str(max(steps)) / "state").absolute()
    try:
        with ocp.PyTreeCheckpointer() as reader:
            tree = ocp.PyTreeCheckpointHandler().metadata(state).tree
            found = {key: leaf for key, leaf in tree.items() if key.startswith(".head.")}
            how = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in found}
            wanted = ocp.args.PyTreeRestore(item=found, restore_args=how, partial_restore=True)
            saved = reader.restore(state, args=wanted)
    # Whatever a broken checkpoint may come to.
    except Exception as error:
        raise CheckpointError(f"{state} cannot be read ({type(error).__name__}); {mend}") from None
    # ".head.layers[0].mlp.up_proj.weight.value" is "mtp.layers.0.mlp.up_proj.weight"
    name = lambda key: HEAD + re.sub(r"\[(\d+)\]", r".\1", key.removeprefix(".head.").removesuffix(".value"))  # noqa: E731
    return {name(key): value for key, value in saved.items()}


def _head_values(plan: Plan) -> dict[Entry, jax.Array]:
    heads = [binding for binding in plan.bindings if binding.entry.key.startswith(HEAD)]
    return {binding.entry: _place(binding, plan.block, None) for binding in heads}


def _as_stored(values: Mapping[str, np.ndarray], plan: Plan) -> dict[str, np.ndarray]:
    """The head in the dtypes that the checkpoint of `plan` has for it, scales included."""
    like = {binding.entry.key: binding for binding in plan.bindings}
    embedding = like[plan.prefix + "embed_tokens.weight"]
    stored: dict[str, np.ndarray] = {}
    for key, value in values.items():
        own = like.get(key, embedding)
        if own.scales is None:
            with np.errstate(over="ignore"):
                stored[key] = value.astype(DTYPES[own.stored.dtype])
        else:
            codes, scales = quant.quantise(jnp.asarray(value), block=plan.block, scale_dtype=DTYPES[own.scales.dtype])
            stored |= {key: np.asarray(codes), key + SCALE: np.asarray(scales)}
    for key, value in stored.items():
        if not np.isfinite(value.astype(np.float32)).all():
            raise CheckpointError(f"{key}: not all values are finite as {value.dtype}; give another head")
    return stored


def _write_head(new: dict[str, Stored], files: Files, draft: Path) -> list[str]:
    """Writes the shards that hold the head, and the index where one is added; returns their names."""
    homes = {key: Path(_location(stored)[0]).name for key, stored in files.tensors.items()}
    names = sorted({home for key, home in homes.items() if key.startswith(HEAD)})
    if not names:
        names, homes = [HEAD_SHARD], homes | dict.fromkeys(new, HEAD_SHARD)
        size = sum(stored.nbytes for stored in (files.tensors | new).values())
        _write_index(homes, size, draft)
    for name in names:
        tensors = {key: stored for key, stored in (files.tensors | new).items() if homes[key] == name}
        _write_file([_Piece.of(key, stored) for key, stored in tensors.items()], draft / name)
    return names


def _link(source: Path, target: Path) -> None:
    # Small files are edited by hand, in place; weights are not.
    if source.suffix == ".safetensors":
        # across file systems there is no link
        with contextlib.suppress(OSError):
            return os.link(source.resolve(), target)
    shutil.copyfile(source, target)


def _check_written(expected: Mapping[str, Stored], shards: list[str], draft: Path) -> None:
    """Every tensor has its name, shape and dtype, and in the shards that were written its bytes."""
    found = read_files(draft).tensors
    for key in sorted(expected.keys() | found.keys()):
        if key not in found or key not in expected:
            raise CheckpointError(f"{key}: {'lost' if key in expected else 'came up'} in writing; export it again")
        ours, theirs = expected[key], found[key]
        same = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if same and Path(_location(theirs)[0]).name in shards:
            same = np.array_equal(ours.read_bytes(), theirs.read_bytes())
        if not same:
            raise CheckpointError(f"{key}: reads back otherwise than it was written; export it again")


def _check_logits(ours: Files, draft: Path) -> None:
    """The head loaded from the directory makes the very logits of the one in memory, which is as it is stored."""
    config, files = ModelConfig.from_pretrained(draft), read_files(draft)
    embedding = next(stored for key, stored in files.tensors.items() if key.endswith("embed_tokens.weight"))
    plans = [make_plan(config, one, DTYPES[embedding.dtype]) for one in (files, ours)]
    heads = [
        _fill(plan.table.head, {entry.path: value for entry, value in _head_values(plan).items()}) for plan in plans
    ]
    # Of the trunk, the head needs embedding, norm and unembedding.
    trunk: Qwen35 = nnx.merge(*nnx.split(plans[0].table.model))
    trunk.layers = nnx.List([])
    ends = [b for b in plans[0].bindings if not b.entry.key.startswith(HEAD) and b.entry.path[0] != "layers"]
    trunk = _fill(trunk, {binding.entry.path: _place(binding, plans[0].block, None) for binding in ends})
    found, meant = (np.asarray(probe_logits(head, trunk)) for head in heads)
    if not np.array_equal(found, meant):
        worst = np.abs(found - meant).max()
        raise CheckpointError(f"the head as written makes other logits than the one given, by {worst:g}")


def inspect(directory: str | Path) -> dict[str, Any]:
    """What the file headers say; no tensor is read.

    Returns:
      `parts` (tensors, parameters, bytes and dtypes of `text`, `mtp`, `vision` and fp8 `scales`), `tensors`
      (dtype and shape by name) and `complaints` about single files.

    Raises:
      CheckpointError: as `read_files`.
    """
    files = read_files(directory)
    parts: dict[str, dict[str, Any]] = {}
    for key, stored in sorted(files.tensors.items()):
        part = parts.setdefault(_part(key), {"tensors": 0, "parameters": 0, "bytes": 0, "dtypes": {}})
        part["tensors"] += 1
        part["parameters"] += math.prod(stored.shape)
        part["bytes"] += stored.nbytes
        part["dtypes"][stored.dtype] = part["dtypes"].get(stored.dtype, 0) + 1
    tensors = {key: [stored.dtype, list(stored.shape)] for key, stored in sorted(files.tensors.items())}
    return {"parts": parts, "tensors": tensors, "complaints": list(files.complaints)}


def _part(key: str) -> str:
    if key.startswith(VISION):
        return "vision"
    if key.endswith(SCALE):
        return "scales"
    return "mtp" if key.startswith(HEAD) else "text"


def verify(directory: str | Path) -> dict[str, Any]:
    """All `complaints` about a checkpoint, and `warnings`: no MTP head, or one that looks untrained.

    Reads headers, and the values of the MTP tensors.

    Raises:
      CheckpointError: as `read_files`.
      ValueError: from `ModelConfig`.
    """
    plan = make_plan(ModelConfig.from_pretrained(directory), read_files(directory))
    complaints, warnings = list(plan.complaints), []
    if not plan.has_head:
        warnings.append("no mtp.* tensors: plain decoding only, k must be 0")
    flat_norms, norms = [], 0
    for binding in plan.bindings:
        key, stored = binding.entry.key, binding.stored
        if not key.startswith(HEAD) or stored.dtype not in DTYPES:
            continue
        values = stored.read().astype(np.float32)
        if not np.isfinite(values).all():
            complaints.append(f"{key}: not all values are finite")
        elif values.ndim > 1 and values.min() == values.max():
            warnings.append(f"{key}: every value is {values.flat[0]:g}, as if never trained")
        if values.ndim == 1:
            norms += 1
            flat_norms += [key] if values.min() == values.max() else []
    if norms and len(flat_norms) == norms:
        warnings.append(f"all {norms} norms of the MTP head are constant, as freshly initialised: was it ever trained?")
    return {
        "complaints": complaints,
        "warnings": warnings,
        "tensors": len(plan.bindings),
        "prefix": plan.prefix,
    }


def _print_rows(console: rich.console.Console, rows: Iterable[tuple[str, ...]]) -> None:
    table = rich.table.Table(box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _part_row(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    dtypes = ", ".join(f"{count} x {dtype}" for dtype, count in sorted(part["dtypes"].items()))
    return (
        name,
        f"{part['tensors']} tensors",
        f"{part['parameters']:,} values",
        f"{part['bytes']:,} bytes",
        dtypes,
    )


def _run(args: argparse.Namespace, console: rich.console.Console) -> tuple[dict[str, Any], int]:
    directory = resolve(args.source, args.revision)
    if args.command == "inspect":
        result = inspect(directory)
        for key, (dtype, shape) in result["tensors"].items():
            console.print(f"{key}  {dtype} {shape}", markup=False, highlight=False)
        _print_rows(console, [_part_row(name, part) for name, part in result["parts"].items()])
    elif args.command == "verify":
        result = verify(directory)
        counts = [f"{len(result[kind])} {kind}" for kind in ("complaints", "warnings")]
        console.print(f"{result['tensors']} parameters matched, {', '.join(counts)}", highlight=False)
        for warning in result["warnings"]:
            console.print(f"warning: {warning}", markup=False, highlight=False)
    elif args.head is not None:
        shards = export_head(args.head, args.source, args.out, revision=args.revision)
        result = {"head": str(args.head), "out": str(args.out), "written": shards}
        _print_rows(console, [(name, str(value)) for name, value in result.items()])
    else:
        result = _run_export(args, directory, console)
    for complaint in result.get("complaints", ()):
        console.print(f"complaint: {complaint}", markup=False, highlight=False)
    return result, 1 if result.get("complaints") else 0


def _run_export(args: argparse.Namespace, directory: Path, console: rich.console.Console) -> dict[str, Any]:
    # Before the weights are read, which takes a while.
    _check_free(args.out)
    terminal = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        loaded = load(
            directory,
            dtype=args.dtype or "bfloat16",
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        bar.update(task, description="writing", total=None)
        out = export(
            loaded, args.out, like=directory, layout=args.layout, shard_bytes=args.shard_bytes or 5_000_000_000
        )
    _print_rows(console, [*loaded.report.rows(), ("written to", str(out))])
    return {"out": str(out), "report": dataclasses.asdict(loaded.report)}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0 if all is well, 1 if the checkpoint has complaints, 2 if it cannot be looked at."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp.weights", description="Look at, check or rewrite a checkpoint."
    )
    parser.add_argument("command", choices=("inspect", "verify", "export"))
    parser.add_argument("source", nargs="?", help="a checkpoint directory, a hub id, or demo")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    group = parser.add_argument_group("export")
    group.add_argument("--out", type=Path, help="directory to write, new or empty")
    group.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16")
    group.add_argument("--layout", choices=tuple(LAYOUTS), help="names to write; those that were read if left out")
    group.add_argument("--shard-bytes", type=int, help="most bytes of tensors in a file (default: 5,000,000,000)")
    group = parser.add_argument_group("export of a trained head")
    group.add_argument("--head", metavar="CKPT", help="mtp.* tensors, or a run of train.draft_head: only they change")
    group.add_argument("--into", metavar="SOURCE", help="the source, by another name")
    args = parser.parse_args(argv)
    if (args.source is None) == (args.into is None):
        parser.error("name the source once: as SOURCE or as --into SOURCE")
    args.source = args.source or args.into
    if (args.command == "export") != (args.out is not None):
        parser.error("export needs --out DIR" if args.out is None else "--out goes with export only")
    if args.head is not None and args.command != "export":
        parser.error("--head goes with export only")
    if args.head is not None and (args.dtype or args.layout or args.shard_bytes):
        parser.error("with --head, dtypes, names and shards stay those of the source")
    console = rich.console.Console(quiet=args.json, soft_wrap=True)
    try:
        result, status = _run(args, console)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")}
    print(json.dumps({"command": args.command, "source": args.source, **result, "versions": versions}))
    return status


if __name__ == "__main__":
    sys.exit(main())
