"""Ten tiny Qwen3.5 configs that differ in every ratio the format allows, their weights, and a checkpoint writer.

Numpy only, so that the reference environment (torch, transformers) and the tests (JAX) build the very same
weights. Each tensor has a generator keyed by (seed, name): its value depends on neither order nor neighbours.
Matmul gain is 0.5 / sqrt(fan_in), because hotter random weights are chaotic and would hide real errors.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Config = dict[str, Any]

COMPOSITE_PREFIX = "model.language_model."
TEXT_PREFIX = "model."
# The published 3.5 files keep these in float32 whatever the rest is.
FLOAT32_SUFFIXES = ("linear_attn.A_log", "linear_attn.norm.weight")

LINEAR, FULL = "linear_attention", "full_attention"


def _config(
    *,
    vocab: int,
    hidden: int,
    mlp: int,
    layers: str,
    heads: tuple[int, int],
    head_dim: int,
    rotary: float,
    linear_heads: tuple[int, int],
    linear_dims: tuple[int, int],
    conv: int,
    tied: bool = False,
    theta: float = 1e7,
    eps: float = 1e-6,
) -> Config:
    """The published nested layout. `layers` spells the pattern: L linear, F full.

    Pairs are (query, kv) heads, (key, value) heads of the delta rule, and (key, value) dims of those heads.
    """
    half = int(head_dim * rotary) // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": len(layers),
        "layer_types": [{"L": LINEAR, "F": FULL}[kind] for kind in layers],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "linear_num_key_heads": linear_heads[0],
        "linear_num_value_heads": linear_heads[1],
        "linear_key_head_dim": linear_dims[0],
        "linear_value_head_dim": linear_dims[1],
        "linear_conv_kernel_dim": conv,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 2048,
        "rms_norm_eps": eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotary,
            "mrope_interleaved": True,
            "mrope_section": section,
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "eos_token_id": 1,
    }
    if tied:
        # The tied releases carry the key in both places, the untied ones outside only; transformers' text
        # class looks at the inner one.
        text["tie_word_embeddings"] = True
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": tied,
        "text_config": text,
    }


CONFIGS: dict[str, Config] = {
    # The ratios of the 27B: six queries a key, three value heads a key head, every fourth layer full.
    "published_ratios": _config(
        vocab=384, hidden=96, mlp=320, layers="LLLF", heads=(6, 1), head_dim=32, rotary=0.25,
        linear_heads=(2, 6), linear_dims=(32, 32), conv=4,
    ),
    # The head sizes of the 27B, so that kernels see the widths they are written for.
    "published_head_sizes": _config(
        vocab=520, hidden=64, mlp=128, layers="LLLF", heads=(2, 1), head_dim=256, rotary=0.25,
        linear_heads=(1, 3), linear_dims=(128, 128), conv=4, tied=True,
    ),
    "equal_linear_heads_tied": _config(
        vocab=320, hidden=64, mlp=112, layers="LLLFLLLF", heads=(4, 2), head_dim=16, rotary=0.5,
        linear_heads=(2, 2), linear_dims=(16, 16), conv=4, tied=True,
    ),
    "wide_values": _config(
        vocab=300, hidden=80, mlp=200, layers="LFLLF", heads=(3, 1), head_dim=24, rotary=0.25,
        linear_heads=(2, 4), linear_dims=(16, 40), conv=3, theta=1e4, eps=1e-5,
    ),
    "wide_keys_full_first": _config(
        vocab=260, hidden=72, mlp=96, layers="FLL", heads=(2, 2), head_dim=256, rotary=0.25,
        linear_heads=(2, 8), linear_dims=(48, 8), conv=5, tied=True, theta=1e6,
    ),
    "full_only": _config(
        vocab=280, hidden=100, mlp=180, layers="FF", heads=(8, 8), head_dim=20, rotary=1.0,
        linear_heads=(1, 1), linear_dims=(8, 8), conv=4, theta=5e5,
    ),
    "linear_only": _config(
        vocab=256, hidden=48, mlp=144, layers="LLL", heads=(4, 4), head_dim=16, rotary=1.0,
        linear_heads=(2, 12), linear_dims=(24, 24), conv=2,
    ),
    "single_layer": _config(
        vocab=200, hidden=56, mlp=64, layers="L", heads=(6, 3), head_dim=8, rotary=0.5,
        linear_heads=(4, 8), linear_dims=(8, 24), conv=4, tied=True, eps=1e-4,
    ),
    "multi_query_irregular": _config(
        vocab=340, hidden=88, mlp=136, layers="FFLLLFL", heads=(8, 1), head_dim=32, rotary=0.5,
        linear_heads=(3, 3), linear_dims=(20, 12), conv=3, theta=1e5,
    ),
    "odd_widths": _config(
        vocab=211, hidden=77, mlp=131, layers="LLF", heads=(5, 1), head_dim=12, rotary=0.5,
        linear_heads=(1, 5), linear_dims=(11, 13), conv=5, eps=1e-5,
    ),
}  # fmt: skip


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model and the MTP head, composite names; no `lm_head.weight` when tied."""
    text = config["text_config"]
    width, mlp, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    queries, kv, head = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    values, value_dim = text["linear_num_value_heads"], text["linear_value_head_dim"]
    value = values * value_dim
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + value

    shared = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
    }
    full = shared | {
        "self_attn.q_proj.weight": (2 * queries * head, width),
        "self_attn.k_proj.weight": (kv * head, width),
        "self_attn.v_proj.weight": (kv * head, width),
        "self_attn.o_proj.weight": (width, queries * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    linear = shared | {
        "linear_attn.in_proj_qkv.weight": (channels, width),
        "linear_attn.in_proj_z.weight": (value, width),
        "linear_attn.in_proj_a.weight": (values, width),
        "linear_attn.in_proj_b.weight": (values, width),
        "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (values,),
        "linear_attn.dt_bias": (values,),
        "linear_attn.norm.weight": (value_dim,),
        "linear_attn.out_proj.weight": (width, value),
    }
    table = {
        COMPOSITE_PREFIX + "embed_tokens.weight": (vocab, width),
        COMPOSITE_PREFIX + "norm.weight": (width,),
    }
    for index, kind in enumerate(text["layer_types"]):
        layer = full if kind == FULL else linear
        table |= {f"{COMPOSITE_PREFIX}layers.{index}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        table["lm_head.weight"] = (vocab, width)
    table |= {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        "mtp.norm.weight": (width,),
    }
    table |= {f"mtp.layers.0.{name}": shape for name, shape in full.items()}
    return table


def _draw(name: str, shape: tuple[int, ...], tied: bool, rng: np.random.Generator) -> np.ndarray:
    if name.endswith("linear_attn.norm.weight"):
        return rng.normal(1.0, 0.1, shape)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.5, 8.0, shape))
    if name.endswith("dt_bias"):
        return rng.uniform(-3.0, 1.0, shape)
    if name.endswith("conv1d.weight"):
        return rng.normal(0.0, 0.3, shape)
    if name.endswith("embed_tokens.weight"):
        return rng.normal(0.0, 1.0, shape)
    # A tied embedding unembeds too: the norm before it then takes over the matmul gain. Logits would otherwise
    # be near 80, where float32 rounding alone is 2e-5.
    if tied and name in (COMPOSITE_PREFIX + "norm.weight", "mtp.norm.weight"):
        return rng.normal(1.0, 0.1, shape) * 0.5 / shape[0] ** 0.5 - 1.0
    if len(shape) == 1:
        return rng.normal(0.0, 0.1, shape)
    return rng.normal(0.0, 0.5 / shape[-1] ** 0.5, shape)


def tensors(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """The whole float32 state dict of `config`, trunk and MTP head, under the composite release's names."""
    drawn = {}
    for name, shape in shapes(config).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        drawn[name] = _draw(name, shape, config["tie_word_embeddings"], rng).astype(np.float32)
    return drawn


def checksums(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Float64 sum of each tensor, in name order: tells whether two environments drew the same weights."""
    return np.array([tensors[name].sum(dtype=np.float64) for name in sorted(tensors)])


def token_ids(config: Config, length: int = 300, seed: int = 0) -> np.ndarray:
    """`length` uniform token ids [T] int32."""
    rng = np.random.default_rng([seed, zlib.crc32(b"token_ids")])
    return rng.integers(0, config["text_config"]["vocab_size"], length, dtype=np.int32)


def _vision_tensors() -> dict[str, np.ndarray]:
    """A handful of tensors under real vision names: what a text reader has to skip, at toy size."""
    rng = np.random.default_rng(7)
    shapes = {
        "blocks.0.attn.qkv.weight": (12, 4),
        "blocks.0.attn.qkv.bias": (12,),
        "blocks.0.norm1.weight": (4,),
        "merger.norm.weight": (4,),
        "patch_embed.proj.weight": (4, 3, 2, 2, 2),
        "pos_embed.weight": (16, 4),
    }
    return {f"model.visual.{name}": rng.normal(size=shape) for name, shape in shapes.items()}


def write_checkpoint(
    out_dir: str | Path,
    config: Config,
    tensors: Mapping[str, np.ndarray],
    *,
    shards: int = 1,
    prefix: str = COMPOSITE_PREFIX,
    flat_config: bool = False,
    dtype: Any = np.float32,
    small_dtype: Any = np.float32,
    with_vision: bool = False,
    with_mtp: bool = True,
    stem: str = "model.safetensors-{index:05d}-of-{count:05d}.safetensors",
) -> Path:
    """Writes `config.json` and safetensors files as a hub repository would hold them; returns the directory.

    One shard is a lone `model.safetensors`. More are dealt out in name order, so that layers cross files, named by
    `stem`, with `model.safetensors.index.json` beside them. `prefix` replaces `model.language_model.`;
    `flat_config` writes the text config alone. Float32 tensors are cast to `dtype` (a numpy or ml_dtypes type),
    `A_log` and `linear_attn.norm` to `small_dtype`; tensors of any other type (fp8 codes a test has made) and
    `weight_scale_inv` companions are written as they are.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, value in tensors.items():
        if name.startswith("mtp.") and not with_mtp:
            continue
        if value.dtype == np.float32 and not name.endswith("weight_scale_inv"):
            value = value.astype(small_dtype if name.endswith(FLOAT32_SUFFIXES) else dtype)
        if name.startswith(COMPOSITE_PREFIX):
            name = prefix + name.removeprefix(COMPOSITE_PREFIX)
        written[name] = np.ascontiguousarray(value)
    if with_vision:
        written |= {name: value.astype(dtype) for name, value in _vision_tensors().items()}

    if flat_config:
        config = {
            "architectures": ["Qwen3_5ForCausalLM"],
            **config["text_config"],
            "tie_word_embeddings": config["tie_word_embeddings"],
        }
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    if shards == 1:
        save_file(written, out_dir / "model.safetensors", metadata={"format": "pt"})
        return out_dir
    names = sorted(written)
    weight_map = {}
    for index in range(shards):
        file = stem.format(index=index + 1, count=shards)
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        save_file({name: written[name] for name in part}, out_dir / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total_size = sum(value.nbytes for value in written.values())
    index_json = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (out_dir / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")
    return out_dir
