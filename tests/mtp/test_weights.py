"""Checkpoints of every published form are read, refused or written back as the format says.

Tiny random checkpoints come from `tests/goldens/tiny_checkpoints.py`; values are compared bit for bit, by walking the
attributes that a Hugging Face name spells, not through the table under test.
"""

import dataclasses
import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants as hub
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mtp import quant, weights
from mtp.config import ModelConfig
from mtp.sharding import make_mesh
from tests.goldens import tiny_checkpoints as tiny

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
NAME = "published_ratios"
RAW = tiny.CONFIGS[NAME]
CONFIG = ModelConfig.from_hf(RAW)
TENSORS = tiny.tensors(RAW)
QUANTISED = re.compile(r"_proj\.weight$|in_proj_(qkv|z)\.weight$|out_proj\.weight$")

# Qwen3.5 by size: text and MTP parameters, vision parameters, text tensors, bytes of the published index.
PUBLISHED = {
    "qwen3.5-0.8b": (752_393_024, 20_452_864, 100_592_896, 320, 1_746_882_752),
    "qwen3.5-2b": (1_881_825_088, 60_828_160, 331_416_576, 320, 4_548_144_832),
    "qwen3.5-4b": (4_205_751_296, 120_599_552, 333_514_240, 426, 9_319_737_856),
    "qwen3.5-9b": (8_953_803_264, 243_290_624, 456_010_480, 427, 19_306_216_416),
    "qwen3.5-27b": (26_895_998_464, 424_699_392, 460_730_096, 851, 55_562_872_800),
    "qwen3.6-27b": (26_895_998_464, 424_699_392, 460_730_096, 851, 55_562_855_904),
    "qwen3.8-27b": (26_895_998_464, 424_699_392, 460_730_096, 851, 55_562_855_904),
}


def parameter(loaded: weights.Loaded, key: str) -> np.ndarray:
    """The parameter that a Hugging Face name spells, walked attribute by attribute, in the shape of the file."""
    module, names = loaded.model, key.removeprefix(weights.COMPOSITE).split(".")
    if names[0] == "mtp":
        module, names = loaded.head, names[1:]
    for name in names:
        module = module[int(name)] if name.isdigit() else getattr(module, name)
    value = np.asarray(module[...])
    return value[:, None, :] if key.endswith("conv1d.weight") else value


def assert_holds(loaded: weights.Loaded, tensors: dict[str, np.ndarray], dtype: np.dtype) -> None:
    for key, value in tensors.items():
        small = key.endswith(tiny.FLOAT32_SUFFIXES)
        expected = value.astype(np.float32 if small else dtype)
        got = parameter(loaded, key)
        assert got.dtype == expected.dtype, key
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8), err_msg=key)


def quantise(tensors: dict[str, np.ndarray], block: tuple[int, int], scale_dtype: np.dtype) -> dict[str, np.ndarray]:
    """The fp8 release of these tensors: projections become e4m3 codes that reach 448, with a scale a block."""
    out = {}
    for key, value in tensors.items():
        if not QUANTISED.search(key) or key.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            out[key] = value
            continue
        scales = np.zeros(quant.scale_shape(value.shape, block), np.float32)
        for i, j in np.ndindex(scales.shape):
            part = value[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(part).max() / 448
        scales = scales.astype(scale_dtype)
        rows, columns = np.indices(value.shape)
        wide = scales.astype(np.float32)[rows // block[0], columns // block[1]]
        out[key] = np.clip(value / wide, -448, 448).astype(FP8)
        out[key + "_scale_inv"] = scales
    return out


def dequantised(tensors: dict[str, np.ndarray], block: tuple[int, int]) -> dict[str, np.ndarray]:
    out = {}
    for key, value in tensors.items():
        if value.dtype == FP8:
            rows, columns = np.indices(value.shape)
            scales = tensors[key + "_scale_inv"].astype(np.float32)
            value = value.astype(np.float32) * scales[rows // block[0], columns // block[1]]
        if not key.endswith("_scale_inv"):
            out[key] = value
    return out


def fp8_config(block: tuple[int, int]) -> dict:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    return RAW | {"quantization_config": quantization | {"modules_to_not_convert": ["mtp.fc"]}}


def complaints_about(tensors: dict[str, np.ndarray], config: ModelConfig = CONFIG) -> tuple[str, ...]:
    with pytest.raises(weights.CheckpointError) as error:
        weights.from_tensors(config, tensors)
    return error.value.complaints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Composite, float32, three shards, with vision tensors. Not to be changed."""
    out = tmp_path_factory.mktemp("checkpoint")
    return tiny.write_checkpoint(out, RAW, TENSORS, shards=3, with_vision=True)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> weights.Loaded:
    return weights.load(checkpoint, dtype=jnp.float32)


# The table


@pytest.mark.parametrize("name", PUBLISHED)
def test_table_has_the_published_parameters_and_bytes_without_a_weight(name):
    text, mtp, vision, num_text, total_size = PUBLISHED[name]
    entries = weights.Table.of(ModelConfig.preset(name)).entries.values()
    heads = [entry for entry in entries if entry.key.startswith("mtp.")]
    trunk = [entry for entry in entries if not entry.key.startswith("mtp.")]
    assert (len(trunk), len(heads)) == (num_text, 15)
    assert sum(entry.size for entry in trunk) == text
    assert sum(entry.size for entry in heads) == mtp
    # Everything is bf16 in the files; the 3.5 releases keep the two small tensors of each delta-rule layer in float32.
    small = sum(entry.size for entry in trunk if entry.key.endswith(tiny.FLOAT32_SUFFIXES))
    assert 2 * (text + mtp + vision) + 2 * small * name.startswith("qwen3.5") == total_size


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_table_names_and_shapes_are_those_of_the_checkpoint_format(name):
    raw = tiny.CONFIGS[name]
    entries = weights.Table.of(ModelConfig.from_hf(raw)).entries
    assert {key: entry.file_shape for key, entry in entries.items()} == tiny.shapes(raw)


# Loading


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize(("shards", "flat", "prefix"), [(1, True, "model."), (3, False, tiny.COMPOSITE_PREFIX)])
def test_training_D30_every_layout_prefix_and_dtype_loads_bit_for_bit(tmp_path, shards, flat, prefix, dtype):
    stored = {key: value.astype(dtype) for key, value in TENSORS.items()}
    tiny.write_checkpoint(
        tmp_path, RAW, TENSORS, shards=shards, flat_config=flat, prefix=prefix, dtype=dtype, small_dtype=dtype
    )
    loaded = weights.load(tmp_path, dtype=dtype)
    assert_holds(loaded, stored, dtype)
    assert loaded.config == CONFIG
    assert (loaded.report.prefix, loaded.report.tensors_read) == (prefix, len(TENSORS))
    assert loaded.report.dtypes == {weights.DTYPE_NAMES[dtype]: len(TENSORS)}
    assert loaded.report.parameters == sum(value.size for value in TENSORS.values())


def test_values_are_rounded_to_the_asked_dtype_and_small_tensors_stay_float32(checkpoint):
    assert_holds(weights.load(checkpoint), TENSORS, BF16)


@pytest.mark.parametrize(
    "stem", ["model.safetensors-{index:05d}-of-{count:05d}.safetensors", "layers-{index}.safetensors"]
)
def test_tensors_are_found_by_name_through_the_index(tmp_path, stem):
    tiny.write_checkpoint(tmp_path, RAW, TENSORS, shards=4, stem=stem)
    index = json.loads((tmp_path / weights.INDEX).read_text())["weight_map"]
    assert len({file for key, file in index.items() if key.startswith(tiny.COMPOSITE_PREFIX + "layers.3.")}) > 1
    # A stale file that the index does not list is not looked at.
    save_file({"mtp.fc.weight": np.zeros((2, 2), np.float32)}, tmp_path / "stale.safetensors")
    assert_holds(weights.load(tmp_path, dtype=jnp.float32), TENSORS, np.dtype(np.float32))


def test_vision_tensors_are_skipped_and_counted(loaded):
    assert loaded.report.vision_skipped == 6
    assert loaded.report.tensors_read == len(TENSORS)
    assert loaded.report.bytes_read == sum(value.nbytes for value in TENSORS.values())
    assert ("vision tensors skipped", "6") in loaded.report.rows()


def test_inference_F59_norms_are_loaded_without_a_shift(loaded):
    norms = [key for key in TENSORS if re.search(r"norm(_embedding|_hidden)?\.weight$", key)]
    # 4 layers: 2 each, and 1 of each delta-rule or 2 of the attention layer; the final one; 7 in the head.
    assert len(norms) == 8 + 3 + 2 + 1 + 7
    assert_holds(loaded, {key: TENSORS[key] for key in norms}, np.dtype(np.float32))


@pytest.mark.parametrize("same", [True, False])
def test_tied_checkpoint_may_repeat_its_embedding_but_not_contradict_it(same):
    raw = tiny.CONFIGS["single_layer"]
    tensors = tiny.tensors(raw)
    config = ModelConfig.from_hf(raw)
    assert weights.from_tensors(config, tensors).model.lm_head is None
    unembed = tensors[tiny.COMPOSITE_PREFIX + "embed_tokens.weight"].copy()
    if same:
        assert weights.from_tensors(config, tensors | {"lm_head.weight": unembed}).model.lm_head is None
        return
    unembed[3, 5] += 1
    (complaint,) = complaints_about(tensors | {"lm_head.weight": unembed}, config)
    assert complaint.startswith("lm_head.weight: differs from embed_tokens.weight")


def test_untied_checkpoint_needs_its_head():
    tensors = {key: value for key, value in TENSORS.items() if key != "lm_head.weight"}
    assert complaints_about(tensors) == ("lm_head.weight: missing",)


def test_arrays_in_memory_are_copied():
    tensors = {key: value.copy() for key, value in TENSORS.items()}
    loaded = weights.from_tensors(CONFIG, tensors, jnp.float32)
    for value in tensors.values():
        value[...] = 7
    assert_holds(loaded, TENSORS, np.dtype(np.float32))


@pytest.mark.parametrize("fp8", [False, True])
def test_parameters_lie_on_the_mesh_by_the_axes_they_carry(tmp_path, fp8):
    tensors = quantise(TENSORS, (128, 128), BF16) if fp8 else TENSORS
    tiny.write_checkpoint(tmp_path, fp8_config((128, 128)) if fp8 else RAW, tensors)
    mesh = make_mesh(data=2, tensor=2)
    loaded = weights.load(tmp_path, dtype=jnp.float32, mesh=mesh)
    assert_holds(loaded, dequantised(tensors, (128, 128)), np.dtype(np.float32))
    layer = loaded.model.layers[0]
    for param, spec in [
        (layer.mlp.gate_proj.weight, ("tensor", None)),
        (layer.mlp.down_proj.weight, (None, "tensor")),
        (loaded.model.norm.weight, (None,)),
        (loaded.head.layers[0].mlp.up_proj.weight, ("tensor", None)),
    ]:
        assert param[...].sharding.mesh == mesh
        assert param[...].sharding.spec == jax.sharding.PartitionSpec(*spec)
    assert layer.mlp.gate_proj.weight[...].addressable_shards[0].data.shape == (160, 96)


@pytest.mark.parametrize("fp8", [False, True])
def test_host_never_holds_more_than_one_tensor_beyond_the_model(tmp_path, monkeypatch, fp8):
    tensors = quantise(TENSORS, (128, 128), BF16) if fp8 else TENSORS
    tiny.write_checkpoint(tmp_path, fp8_config((128, 128)) if fp8 else RAW, tensors, shards=2)
    live: dict[int, int] = {}
    peaks: list[int] = []
    read_bytes = weights.Stored.read_bytes
    # The dtype asked for below is stored nowhere, so no buffer becomes a parameter, as one of the right dtype may on
    # a CPU. Only the small float32 tensors do.
    kept = sum(value.nbytes for key, value in tensors.items() if key.endswith(tiny.FLOAT32_SUFFIXES))

    def counting(stored: weights.Stored) -> np.ndarray:
        value = read_bytes(stored)
        live[id(value)] = value.nbytes
        weakref.finalize(value, live.pop, id(value))
        peaks.append(sum(live.values()))
        return value

    monkeypatch.setattr(weights.Stored, "read_bytes", counting)
    weights.load(tmp_path, dtype=jnp.float16)
    largest = max(value.nbytes for value in tensors.values())
    assert len(peaks) == len(tensors)
    assert largest <= max(peaks) <= largest + kept


# fp8


@pytest.mark.parametrize("block", [(128, 128), (32, 48)], ids=str)
@pytest.mark.parametrize("scale_dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
def test_fp8_checkpoint_is_dequantised_tensor_by_tensor(tmp_path, block, scale_dtype):
    tensors = quantise(TENSORS, block, scale_dtype)
    tiny.write_checkpoint(tmp_path, fp8_config(block), tensors, shards=2, dtype=BF16)
    loaded = weights.load(tmp_path)
    expected = {
        key: value if tensors[key].dtype == FP8 else value.astype(BF16)
        for key, value in dequantised(tensors, block).items()
    }
    expected |= {key: TENSORS[key] for key in TENSORS if key.endswith(tiny.FLOAT32_SUFFIXES)}
    assert_holds(loaded, expected, BF16)
    assert loaded.report.dequantised == sum(value.dtype == FP8 for value in tensors.values()) == 3 * 6 + 7 + 7
    # The codes mean what they should: within half a step of e4m3 (2^-4 relative) and of the scale's own rounding.
    key = tiny.COMPOSITE_PREFIX + "layers.0.mlp.up_proj.weight"
    error = np.abs(parameter(loaded, key).astype(np.float32) - TENSORS[key])
    assert error.max() <= np.abs(TENSORS[key]).max() * 0.04


def test_inference_F55_and_training_D31_an_unquantised_head_in_an_fp8_checkpoint_keeps_its_values(tmp_path):
    """The quantisation of a tensor is read off the tensor; what config.json says about the rest does not reach it."""
    trunk = {key: value for key, value in TENSORS.items() if not key.startswith("mtp.")}
    head = {key: value.astype(BF16) for key, value in TENSORS.items() if key.startswith("mtp.")}
    tensors = quantise(trunk, (128, 128), BF16) | head
    tiny.write_checkpoint(tmp_path, fp8_config((128, 128)), tensors, dtype=BF16)
    loaded = weights.load(tmp_path)
    assert_holds(loaded, head, BF16)
    assert loaded.report.dequantised == 3 * 6 + 7
    assert {"BF16", "F32", "F8_E4M3"} == loaded.report.dtypes.keys()


def test_inference_F57_fp8_without_scales_is_refused_by_name():
    tensors = quantise(TENSORS, (128, 128), BF16)
    bare = {key: value for key, value in tensors.items() if not key.endswith("_scale_inv")}
    found = complaints_about(bare)
    assert len(found) == 32
    for key, value in bare.items():
        told = f"{key}: fp8 without its scale_inv companion; without scales the values mean nothing"
        assert (told in found) == (value.dtype == FP8)


def test_scales_that_belong_to_nothing_or_have_another_shape_are_refused():
    tensors = quantise(TENSORS, (128, 128), BF16)
    gate, up, down = (f"mtp.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    tensors["mtp.layers.0.mlp.extra.weight_scale_inv"] = np.ones((1, 1), np.float32)
    tensors[gate] = TENSORS[gate]
    tensors[up + "_scale_inv"] = np.ones((2, 2), np.float32)
    tensors[down + "_scale_inv"] = np.ones((1, 3), np.int32)
    assert complaints_about(tensors) == (
        f"{down}_scale_inv: scales of dtype int32 are not supported; supported: F32, F16, BF16",
        "mtp.layers.0.mlp.extra.weight_scale_inv: scale companion left over, there is no mtp.layers.0.mlp.extra.weight",
        f"{gate}_scale_inv: scale companion left over, {gate} is F32",
        f"{up}_scale_inv: has shape [2, 2], blocks of [128, 128] ask for [3, 1]",
    )


# A checkpoint without a head, or with parts of one


def test_training_D27_a_checkpoint_without_a_head_loads_for_plain_decoding_and_says_so(tmp_path):
    tiny.write_checkpoint(tmp_path, RAW, TENSORS, with_mtp=False)
    loaded = weights.load(tmp_path, dtype=jnp.float32)
    assert loaded.head is None and not loaded.report.has_head
    assert dict(loaded.report.rows())["MTP head"] == ("none in this checkpoint: plain decoding only, k must be 0")
    trunk = {key: value for key, value in TENSORS.items() if not key.startswith("mtp.")}
    assert_holds(loaded, trunk, np.dtype(np.float32))
    again = weights.load(weights.export(loaded, tmp_path / "out"), dtype=jnp.float32)
    assert again.head is None
    assert weights.verify(tmp_path)["warnings"] == ["no mtp.* tensors: plain decoding only, k must be 0"]


@pytest.mark.parametrize("gone", [key for key in TENSORS if key.startswith("mtp.")])
def test_inference_F54_a_head_with_a_missing_tensor_is_refused_by_name(gone):
    tensors = {key: value for key, value in TENSORS.items() if key != gone}
    assert complaints_about(tensors) == (f"{gone}: missing",)


def test_training_D28_a_renamed_head_tensor_is_both_missing_and_unexpected():
    tensors = dict(TENSORS)
    tensors["mtp.layers.0.self_attn.qkv_proj.weight"] = tensors.pop("mtp.layers.0.self_attn.q_proj.weight")
    assert complaints_about(tensors) == (
        "mtp.layers.0.self_attn.q_proj.weight: missing",
        "mtp.layers.0.self_attn.qkv_proj.weight: unexpected",
    )


def test_head_tensors_that_the_config_denies_are_refused():
    raw = RAW | {"text_config": RAW["text_config"] | {"mtp_num_hidden_layers": 0}}
    config = ModelConfig.from_hf(raw)
    found = complaints_about(TENSORS, config)
    assert len(found) == 15
    assert "mtp.fc.weight: unexpected (config.json says mtp_num_hidden_layers = 0)" in found
    trunk = {key: value for key, value in TENSORS.items() if not key.startswith("mtp.")}
    assert weights.from_tensors(config, trunk).head is None


def test_training_D28_verify_warns_of_a_head_that_was_never_trained(tmp_path):
    zero = {key: np.zeros_like(value) for key, value in TENSORS.items() if key[:4] == "mtp." and value.ndim == 1}
    assert len(zero) == 7
    tiny.write_checkpoint(tmp_path / "fresh", RAW, TENSORS | zero)
    report = weights.verify(tmp_path / "fresh")
    assert report["complaints"] == []
    assert report["warnings"] == [
        "all 7 norms of the MTP head are constant, as freshly initialised: was it ever trained?"
    ]
    tensors = TENSORS | {"mtp.fc.weight": np.zeros_like(TENSORS["mtp.fc.weight"])}
    tensors["mtp.norm.weight"] = np.full_like(TENSORS["mtp.norm.weight"], np.nan)
    report = weights.verify(tiny.write_checkpoint(tmp_path / "broken", RAW, tensors))
    assert report["complaints"] == ["mtp.norm.weight: not all values are finite"]
    assert report["warnings"] == ["mtp.fc.weight: every value is 0, as if never trained"]


# Everything that does not fit


def test_all_complaints_come_together():
    tensors = dict(TENSORS)
    layer = tiny.COMPOSITE_PREFIX + "layers.0."
    del tensors[layer + "linear_attn.A_log"]
    tensors[layer + "linear_attn.bias"] = np.zeros(3, np.float32)
    conv = layer + "linear_attn.conv1d.weight"
    tensors[conv] = tensors[conv][:, 0, :]
    tensors["mtp.norm.weight"] = tensors["mtp.norm.weight"].astype(np.int8)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    found = complaints_about(tensors)
    assert found == (
        "lm_head.weight: has shape [383, 96], config.json asks for [384, 96]",
        f"{layer}linear_attn.A_log: missing",
        f"{layer}linear_attn.bias: unexpected",
        f"{conv}: has shape [320, 4], config.json asks for [320, 1, 4]",
        "mtp.norm.weight: dtype int8 is not supported; supported: F32, F16, BF16, F8_E4M3",
    )
    with pytest.raises(weights.CheckpointError) as error:
        weights.from_tensors(CONFIG, tensors)
    assert str(error.value).splitlines() == ["memory: 5 problems", *(f"  {line}" for line in found)]


def test_training_D30_two_prefixes_or_a_foreign_one_are_refused_by_name():
    norm = tiny.COMPOSITE_PREFIX + "norm.weight"
    found = complaints_about(TENSORS | {"model.norm.weight": TENSORS[norm]})
    assert found[0].startswith("text tensors under prefix 'model.', 'model.language_model.'; ")
    foreign = {key.replace(tiny.COMPOSITE_PREFIX, "language_model.model."): value for key, value in TENSORS.items()}
    found = complaints_about(foreign)
    assert found[0].startswith("text tensors under prefix 'language_model.model.'; one of ")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_truncate, "is cut short: "),
        (lambda path: path.write_bytes(path.read_bytes()[:5]), "is cut short or no safetensors file (5 bytes)"),
        (lambda path: path.write_bytes(b"\x10" + bytes(7) + b"this is not JSON"), "has a broken safetensors header"),
        (lambda path: path.write_bytes(b"<html>sign in to download</html>"), "is cut short or no safetensors file"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "is a git-lfs pointer"),
        (Path.unlink, "is missing, and model.safetensors.index.json lists it"),
    ],
)  # fmt: skip
def test_a_broken_shard_is_named_with_its_mend_and_its_tensors_are_not_called_missing(
    tmp_path, checkpoint, harm: Callable[[Path], None], told
):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    shards = sorted(tmp_path.glob("*.safetensors"))
    harm(shards[0])
    with pytest.raises(weights.CheckpointError) as error:
        weights.load(tmp_path)
    (complaint,) = error.value.complaints
    assert complaint.startswith(f"{shards[0]} {told}")
    assert re.search("again$|`git lfs pull`$", complaint)
    _truncate(shards[1])
    with pytest.raises(weights.CheckpointError) as error:
        weights.load(tmp_path)
    assert len(error.value.complaints) == 2


def test_a_broken_single_file_is_the_only_complaint(tmp_path):
    _truncate(tiny.write_checkpoint(tmp_path, RAW, TENSORS) / weights.SINGLE)
    with pytest.raises(weights.CheckpointError, match="model.safetensors is cut short.*copy it again$"):
        weights.load(tmp_path)


def test_files_and_index_that_disagree_are_refused(tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / weights.INDEX).read_text())
    shard = index["weight_map"].pop("mtp.fc.weight")
    index["weight_map"]["mtp.other.weight"] = shard
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    with pytest.raises(weights.CheckpointError) as error:
        weights.load(tmp_path)
    assert f"mtp.fc.weight: is in {shard}, but not in {weights.INDEX}" in error.value.complaints
    assert f"mtp.other.weight: {weights.INDEX} says it is in {shard}, and it is not" in error.value.complaints

    (tmp_path / weights.INDEX).write_text("[]")
    with pytest.raises(weights.CheckpointError, match="is not a safetensors index"):
        weights.load(tmp_path)
    (tmp_path / weights.INDEX).unlink()
    with pytest.raises(weights.CheckpointError, match="3 .safetensors files and no model.safetensors.index.json"):
        weights.load(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(weights.CheckpointError, match="has no .safetensors file"):
        weights.load(tmp_path)


def test_a_single_file_beside_an_index_that_does_not_list_it_is_ambiguous(tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    save_file(TENSORS, tmp_path / weights.SINGLE)
    with pytest.raises(weights.CheckpointError, match="has both model.safetensors and an .*; remove one"):
        weights.load(tmp_path)


# Where it is


@pytest.mark.parametrize(
    ("source", "revision", "told"),
    [
        ("nowhere", None, "nowhere: no such directory; give a checkpoint directory, a hub id or 'demo'"),
        ("empty", None, "empty has no config.json; give the directory of a Hugging Face checkpoint"),
        ("file", None, "file is a file; give the directory that holds config.json and the weights"),
        ("empty", "main", "revision 'main' applies to hub ids, and empty is not one; leave it out"),
        ("no-such/model", "v1", "no-such/model at revision v1: no such directory, not in the hub cache, and the hub "
         "cannot be reached; go online (unset HF_HUB_OFFLINE) or give a directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_said_in_one_line(tmp_path, monkeypatch, capsys, source, revision, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(weights.CheckpointError) as error:
        weights.load(source, revision=revision)
    assert str(error.value) == told
    arguments = ["verify", source, *(["--revision", revision] if revision else [])]
    assert weights.main(arguments) == 2
    assert capsys.readouterr() == ("", f"error: {told}\n")


def test_a_hub_id_is_read_from_the_cache_at_the_revision_asked_for(tmp_path, monkeypatch):
    assert hub.HF_HUB_OFFLINE
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--Some--Model-1.0"
    (repo / "refs").mkdir(parents=True)
    (repo / "blobs").mkdir()
    commits = {"main": "a" * 40, "v2": "b" * 40}
    for seed, (ref, commit) in enumerate(commits.items()):
        (repo / "refs" / ref).write_text(commit)
        plain = tiny.write_checkpoint(tmp_path / ref, RAW, tiny.tensors(RAW, seed), shards=2)
        (repo / "snapshots" / commit).mkdir(parents=True)
        for file in plain.iterdir():
            blob = repo / "blobs" / f"{ref}-{file.name}"
            file.replace(blob)
            (repo / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{blob.name}")
    for revision, seed in [(None, 0), ("main", 0), ("v2", 1), (commits["v2"], 1)]:
        assert weights.resolve("Some/Model-1.0", revision).name == commits["v2" if seed else "main"]
        loaded = weights.load("Some/Model-1.0", revision=revision, dtype=jnp.float32)
        assert_holds(loaded, tiny.tensors(RAW, seed), np.dtype(np.float32))


def test_the_demo_is_a_checkpoint_like_any_other(capsys):
    directory = weights.resolve("demo")
    assert directory == Path(weights.__file__).parent / "demo"
    loaded = weights.load("demo")
    assert loaded.head is not None
    assert weights.main(["verify", "demo"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["complaints"], result["warnings"]) == ([], [])


# Writing


def _bits(loaded: weights.Loaded) -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in weights.to_tensors(loaded).items()}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("layout", "prefix"), [("composite", tiny.COMPOSITE_PREFIX), ("text", "model.")])
def test_training_D29_names_round_trip_and_load_export_load_is_bit_equal(tmp_path, checkpoint, layout, prefix, dtype):
    loaded = weights.load(checkpoint, dtype=dtype)
    out = weights.export(loaded, tmp_path / "out", layout=layout, shard_bytes=400_000)
    again = weights.load(out, dtype=dtype)
    assert _bits(again) == _bits(loaded)
    assert again.config == loaded.config
    assert again.report.prefix == prefix

    weight_map = json.loads((out / weights.INDEX).read_text())["weight_map"]
    names = {key.replace(tiny.COMPOSITE_PREFIX, prefix) for key in TENSORS}
    assert set(weight_map) == names
    shards = sorted(set(weight_map.values()))
    assert len(shards) > 2
    found, total = {}, 0
    for shard in shards:
        assert (out / shard).stat().st_size < 500_000
        found |= load_file(out / shard)
        with safe_open(out / shard, "np") as file:
            assert file.metadata() == {"format": "pt"}
    for key, value in TENSORS.items():
        expected = value if key.endswith(tiny.FLOAT32_SUFFIXES) else value.astype(np.dtype(dtype))
        got = found[key.replace(tiny.COMPOSITE_PREFIX, prefix)]
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
        total += got.nbytes
    assert json.loads((out / weights.INDEX).read_text())["metadata"]["total_size"] == total


def test_tensors_in_memory_round_trip(loaded):
    tensors = weights.to_tensors(loaded)
    assert tensors.keys() == TENSORS.keys()
    for key, value in TENSORS.items():
        np.testing.assert_array_equal(tensors[key], value)
    assert _bits(weights.from_tensors(CONFIG, tensors, jnp.float32)) == _bits(loaded)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("layout", ["composite", "text"])
def test_export_like_its_parent_keeps_tokenizer_and_vision_and_drops_quantisation(tmp_path, flat, layout):
    tensors = quantise(TENSORS, (128, 128), BF16)
    raw = fp8_config((128, 128)) | {"vision_config": {"depth": 1}, "dtype": "bfloat16"}
    parent = tiny.write_checkpoint(
        tmp_path / "parent", raw, tensors, shards=2, flat_config=flat, with_vision=True, dtype=BF16
    )
    (parent / "tokenizer.json").write_text("{}")
    (parent / "chat_template.jinja").write_text("{{ messages }}")
    (parent / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    loaded = weights.load(parent, dtype=jnp.float32)
    out = weights.export(loaded, tmp_path / "out", like=parent, layout=layout)
    again = weights.load(out, dtype=jnp.float32)
    assert _bits(again) == _bits(loaded)
    assert {file.name for file in out.iterdir()} == {
        "config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", weights.SINGLE, weights.INDEX,
    }  # fmt: skip
    assert (out / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in json.dumps(config)
    assert config.get("text_config", config)["dtype"] == "float32"
    assert "dtype" not in config or layout == "text"
    if layout == "text":
        assert config["architectures"] == ["Qwen3_5ForCausalLM"]
        assert again.report.vision_skipped == 0
        return
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert flat or config["vision_config"] == {"depth": 1}
    written = load_file(out / weights.SINGLE)
    vision = {key: value for file in parent.glob("*.safetensors") for key, value in _vision(file).items()}
    assert len(vision) == again.report.vision_skipped == 6
    for key, value in vision.items():
        assert written[key].tobytes() == value.tobytes()


def _vision(path: Path) -> dict[str, np.ndarray]:
    with safe_open(path, "np") as file:
        return {key: file.get_tensor(key) for key in file.keys() if key.startswith("model.visual.")}


def test_transformers_reads_the_exported_config(tmp_path, loaded):
    from transformers import AutoConfig

    for layout, kind in [("composite", "qwen3_5"), ("text", "qwen3_5_text")]:
        out = weights.export(loaded, tmp_path / layout, layout=layout)
        config = AutoConfig.from_pretrained(out)
        assert config.model_type == kind
        text = config.get_text_config()
        assert text.hidden_size == CONFIG.hidden_size
        assert tuple(text.layer_types) == CONFIG.layer_types
        assert text.rope_parameters["rope_theta"] == CONFIG.rope_theta


def test_transformers_loads_what_we_export(tmp_path, loaded):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    for layout in weights.LAYOUTS:
        out = weights.export(loaded, tmp_path / layout, layout=layout, shard_bytes=400_000)
        model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["mismatched_keys"]
        state = model.state_dict()
        for key, value in TENSORS.items():
            if not key.startswith("mtp."):
                got = state[key.replace(tiny.COMPOSITE_PREFIX, "model.")]
                np.testing.assert_array_equal(got.numpy(), value, err_msg=key)


def test_export_appears_whole_or_not_at_all(tmp_path, loaded, monkeypatch):
    out = tmp_path / "out"
    write = weights._write_file
    calls = []

    def failing(pieces, path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("disk full")
        write(pieces, path)

    monkeypatch.setattr(weights, "_write_file", failing)
    with pytest.raises(OSError, match="disk full"):
        weights.export(loaded, out, shard_bytes=400_000)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    out.mkdir()
    weights.export(loaded, out)
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    with pytest.raises(weights.CheckpointError, match="out exists and is not empty; give a new directory"):
        weights.export(loaded, out)
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]


def test_training_D32_a_model_that_is_not_what_its_config_says_is_not_exported(tmp_path, loaded):
    smaller = dataclasses.replace(CONFIG, vocab_size=300)
    wrong = dataclasses.replace(loaded, config=smaller)
    with pytest.raises(weights.CheckpointError) as error:
        weights.export(wrong, tmp_path / "out")
    assert set(error.value.complaints) == {
        f"{tiny.COMPOSITE_PREFIX}embed_tokens.weight: has shape [384, 96], the config asks for [300, 96]",
        "lm_head.weight: has shape [384, 96], the config asks for [300, 96]",
    }
    parent = tiny.write_checkpoint(tmp_path / "parent", tiny.CONFIGS["single_layer"], {})
    with pytest.raises(weights.CheckpointError, match="is not like this model"):
        weights.export(loaded, tmp_path / "out", like=parent)
    assert not (tmp_path / "out").exists()


# A trained head put back


HEAD = {key: value for key, value in tiny.tensors(RAW, seed=1).items() if key.startswith("mtp.")}
TRUNK = {key: value for key, value in TENSORS.items() if not key.startswith("mtp.")}


def trained(directory: Path, tensors: dict[str, np.ndarray] = HEAD) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "head.safetensors")
    return directory


def stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    tensors = weights.read_files(directory).tensors
    return {key: (one.dtype, one.shape, one.read_bytes().tobytes()) for key, one in tensors.items()}


@pytest.mark.parametrize("quantised", ["nothing", "trunk", "all"])
@pytest.mark.parametrize(("shards", "flat", "prefix"), [(1, True, "model."), (4, False, tiny.COMPOSITE_PREFIX)])
def test_a_trained_head_replaces_the_one_in_the_shards(tmp_path, capsys, quantised, shards, flat, prefix):
    """Each tensor keeps its place, shape and dtype; all but the head keep their bytes, whole files by a hard link."""
    block = (32, 48)
    parts = {"nothing": {}, "trunk": TRUNK, "all": TENSORS}[quantised]
    raw = fp8_config(block) if parts else RAW
    if parts and flat:
        raw = raw | {"text_config": raw["text_config"] | {"quantization_config": raw["quantization_config"]}}
    source = tiny.write_checkpoint(
        tmp_path / "source", raw, TENSORS | quantise(parts, block, BF16), shards=shards, flat_config=flat,
        prefix=prefix, dtype=BF16, with_vision=not flat,
    )  # fmt: skip
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    command = ["export", "--head", str(trained(tmp_path / "head")), "--into", str(source), "--out", str(out)]
    assert weights.main(command) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    before, after = stored(source), stored(out)
    assert before.keys() == after.keys()
    for key, (dtype, shape, data) in before.items():
        assert after[key][:2] == (dtype, shape), key
        assert (after[key][2] == data) == (not key.startswith("mtp.")), key
    assert {file.name for file in out.iterdir()} == {file.name for file in source.iterdir()}
    homes = json.loads((source / weights.INDEX).read_text())["weight_map"] if shards > 1 else {}
    written = {file for key, file in homes.items() if key.startswith("mtp.")} or {weights.SINGLE}
    assert set(said["written"]) == written and (shards == 1 or len(written) < shards)
    for file in source.iterdir():
        shared = file.suffix == ".safetensors" and file.name not in written
        assert (out / file.name).samefile(file) == shared
        assert file.name in written or (out / file.name).read_bytes() == file.read_bytes()
    expected = {key: value.astype(BF16) for key, value in HEAD.items()}
    if quantised == "all":
        codes = quantise(HEAD, block, BF16)
        # our scales, of all the block, are those of the test, and so then are the codes, but for ties
        expected |= {key: dequantised(codes, block)[key].astype(BF16) for key in codes if codes[key].dtype == FP8}
    loaded = weights.load(out)
    for key, value in expected.items():
        np.testing.assert_allclose(parameter(loaded, key).astype(np.float32), value.astype(np.float32), rtol=2**-6)
        if quantised != "all":
            np.testing.assert_array_equal(parameter(loaded, key), value)
    # what was put back can be put elsewhere
    again = tmp_path / "again"
    assert weights.main(["export", str(source), "--head", str(out), "--out", str(again), "--json"]) == 0
    if quantised != "all":
        assert stored(again) == after


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layers", [0, 1])
def test_a_checkpoint_without_a_head_gets_one_in_a_shard_of_its_own(tmp_path, shards, layers):
    raw = RAW | {"text_config": RAW["text_config"] | {"mtp_num_hidden_layers": layers}}
    source = tiny.write_checkpoint(tmp_path / "source", raw, TRUNK, shards=shards, dtype=BF16)
    out = tmp_path / "out"
    assert weights.export_head(trained(tmp_path / "head"), source, out) == [weights.HEAD_SHARD]
    before, after = stored(source), stored(out)
    assert {key: after[key] for key in before} == before and after.keys() - before.keys() == HEAD.keys()
    assert_holds(weights.load(out), HEAD, BF16)
    assert weights.verify(out)["complaints"] == []
    for file in source.glob("*.safetensors"):
        assert (out / file.name).samefile(file)
    assert json.loads((out / "config.json").read_text())["text_config"] == TEXT_WITH_HEAD
    index = json.loads((out / weights.INDEX).read_text())
    assert index["weight_map"]["mtp.fc.weight"] == weights.HEAD_SHARD
    assert index["metadata"]["total_size"] == sum(len(data) for *_, data in after.values())


TEXT_WITH_HEAD = RAW["text_config"]


def _without(key: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in HEAD.items() if name != key}


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (None, "head: no such directory; give a directory with mtp.* tensors of this model, or a run of"),
        ({}, "head has neither .safetensors files nor a checkpoint of a run; give"),
        (TRUNK, "head: no mtp.* tensors; give"),
        (_without("mtp.fc.weight"), "head: mtp.fc.weight: missing; give"),
        (HEAD | {"mtp.norm.weight": np.zeros(64, np.float32)}, "mtp.norm.weight: has shape [64], config.json asks for"),
        (HEAD | {"mtp.layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, "up_proj.weight: unexpected; give"),
        (HEAD | {"mtp.fc.weight": HEAD["mtp.fc.weight"] + np.inf}, "mtp.fc.weight: not all values are finite as"),
        (tiny.tensors(tiny.CONFIGS["wide_values"]), "head: mtp.fc.weight: has shape [80, 160], config.json asks for"),
        ("wide_values", "head is the head of another model: vocab_size is 300, 384 is needed"),
    ],
)  # fmt: skip
def test_what_is_no_head_of_this_model_is_said_in_one_line_and_nothing_is_left(tmp_path, capsys, head, told):
    source = tiny.write_checkpoint(tmp_path / "source", RAW, TENSORS, shards=3, dtype=BF16)
    if isinstance(head, str):
        tiny.write_checkpoint(tmp_path / "head", tiny.CONFIGS[head], tiny.tensors(tiny.CONFIGS[head]))
    elif head:
        trained(tmp_path / "head", head)
    elif head is not None:
        (tmp_path / "head").mkdir()
    kept, files = stored(source), set(tmp_path.iterdir())
    command = ["export", str(source), "--head", str(tmp_path / "head"), "--out", str(tmp_path / "out")]
    assert weights.main(command) == 2
    out, error = capsys.readouterr()
    assert out == "" and told in error and error.count("\n") == 1
    assert stored(source) == kept and set(tmp_path.iterdir()) == files


def test_a_source_that_can_take_no_head_and_a_place_in_use_are_refused(tmp_path, capsys):
    source = tiny.write_checkpoint(tmp_path / "source", RAW, TENSORS)
    head = trained(tmp_path / "head")
    quantised = fp8_config((128, 128))
    bare = tiny.write_checkpoint(tmp_path / "fp8", quantised, quantise(TRUNK, (128, 128), BF16), dtype=BF16)
    broken = tiny.write_checkpoint(tmp_path / "broken", RAW, _without("mtp.norm.weight") | TRUNK)
    for into, out, told in (
        (source, head, "exists and is not empty"),
        (source, source / "new", "lies inside"),
        (bare, tmp_path / "out", "is quantised and has no head to go by; give the release that is not quantised"),
        (broken, tmp_path / "out", "mtp.norm.weight: missing; `python -m mtp.weights verify` lists everything"),
    ):
        assert weights.main(["export", str(into), "--head", str(head), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"source", "head", "fp8", "broken"}
    for wrong in (["export", "--head", "x", "--out", "y"], ["export", "a", "--into", "b", "--head", "x", "--out", "y"]):
        with pytest.raises(SystemExit, match="2"):
            weights.main(wrong)
        assert "name the source once" in capsys.readouterr().err


def test_what_does_not_read_back_as_it_was_written_is_named_and_removed(tmp_path, monkeypatch):
    source = tiny.write_checkpoint(tmp_path / "source", RAW, TENSORS, shards=3, dtype=BF16)
    head, write = trained(tmp_path / "head"), weights._write_file

    def harmful(pieces, path):
        harm = {"mtp.norm.weight": lambda piece: np.zeros(piece.nbytes, np.uint8)}
        harmed = [dataclasses.replace(one, get=lambda one=one: harm[one.key](one)) for one in pieces if one.key in harm]
        write([one for one in pieces if one.key not in harm] + harmed, path)

    monkeypatch.setattr(weights, "_write_file", harmful)
    with pytest.raises(weights.CheckpointError, match="^mtp.norm.weight: reads back otherwise than it was written"):
        weights.export_head(head, source, tmp_path / "out")
    monkeypatch.setattr(weights, "_write_file", write)
    drafts = iter((0.0, 0.5))
    monkeypatch.setattr(weights, "probe_logits", lambda head, trunk: jnp.full((1, 2, 3), next(drafts)))
    with pytest.raises(weights.CheckpointError, match="makes other logits than the one given, by 0.5"):
        weights.export_head(head, source, tmp_path / "out")
    assert {file.name for file in tmp_path.iterdir()} == {"source", "head"}


# The command


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, dict]:
    status = weights.main(list(arguments))
    text = capsys.readouterr().out
    return status, text, json.loads(text.splitlines()[-1])


def test_inspect_reads_headers_only(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(weights.Stored, "read_bytes", None)
    status, text, result = _run(capsys, "inspect", str(checkpoint))
    assert status == 0
    assert "mtp.fc.weight  F32 [96, 192]" in text.splitlines()
    head = [value for key, value in TENSORS.items() if key.startswith("mtp.")]
    assert result["parts"]["mtp"] == {
        "tensors": 15,
        "parameters": sum(value.size for value in head),
        "bytes": sum(value.nbytes for value in head),
        "dtypes": {"F32": 15},
    }
    assert result["parts"]["text"]["tensors"] == len(TENSORS) - 15
    assert result["parts"]["vision"]["tensors"] == 6
    assert result["tensors"]["mtp.fc.weight"] == ["F32", [96, 192]]
    status, text, _ = _run(capsys, "inspect", str(checkpoint), "--json")
    assert len(text.splitlines()) == 1


def test_training_D27_verify_exits_1_and_lists_every_complaint(tmp_path, checkpoint, capsys):
    status, _, result = _run(capsys, "verify", str(checkpoint))
    assert (status, result["complaints"], result["warnings"]) == (0, [], [])
    tensors = {key: value for key, value in TENSORS.items() if key not in ("mtp.fc.weight", "lm_head.weight")}
    tiny.write_checkpoint(tmp_path, RAW, tensors)
    status, text, result = _run(capsys, "verify", str(tmp_path))
    assert status == 1
    assert result["complaints"] == ["lm_head.weight: missing", "mtp.fc.weight: missing"]
    matched = f"{len(tensors)} parameters matched, 2 complaints, 0 warnings"
    told = [matched, *(f"complaint: {complaint}" for complaint in result["complaints"])]
    assert text.splitlines()[:-1] == told


def test_export_command_rewrites_in_another_dtype_and_layout(tmp_path, checkpoint, capsys):
    out = tmp_path / "out"
    status, text, result = _run(
        capsys, "export", str(checkpoint), "--out", str(out), "--dtype", "bfloat16", "--layout", "text"
    )
    assert (status, result["out"], result["report"]["vision_skipped"]) == (0, str(out), 6)
    assert "MTP head" in text
    assert_holds(weights.load(out), TENSORS, BF16)
    assert weights.main(["export", str(checkpoint), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out} exists and is not empty; give a new directory\n"
