"""Checkpoint directories that generate within milliseconds, with the demo's tokenizer.

Their weights are random, but such that the next token depends mostly on the last one and the head knows that, so that
windows are accepted in part.
"""

import importlib.resources
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mtp.config import ModelConfig
from mtp.weights import Table

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
VOCABULARY = 8192


def demo_file(name: str) -> Path:
    """A file of the shipped demo checkpoint."""
    return Path(str(importlib.resources.files("mtp") / "demo" / name))


def config(**overrides: Any) -> ModelConfig:
    """Two layers, one of each kind."""
    fields: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=512,
        eos_token_ids=(8183,),
    )
    return ModelConfig.tiny(**(fields | overrides))


def tensors(config: ModelConfig, seed: int = 0, mixing: float = 0.4, head_noise: float = 0.15) -> dict[str, np.ndarray]:
    """Weights by published name. `mixing` scales what the layers add to the residual stream, `head_noise` what tells
    the head from the trunk."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, np.ndarray] = {}
    for key, entry in Table.of(config).entries.items():
        shape = entry.file_shape
        if key.endswith("A_log"):
            value = np.log(rng.uniform(0.5, 8.0, shape))
        elif key.endswith(("linear_attn.norm.weight", "dt_bias")):
            value = rng.normal(1.0, 0.1, shape)
        elif len(shape) == 1:
            value = rng.normal(0.0, 0.1, shape)
        else:
            value = rng.normal(0.0, 0.5 / shape[-1] ** 0.5, shape)
        if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            value *= mixing
        if key.endswith("embed_tokens.weight"):
            value = rng.normal(0.0, 1.0, shape)
        if key == "lm_head.weight":
            value = rng.normal(0.0, 1.0 / shape[-1] ** 0.5, shape)
        drawn[key] = value
    width = config.hidden_size
    norm = next(value for key, value in drawn.items() if key.endswith(".norm.weight") and "layers" not in key)
    drawn["mtp.norm.weight"] = norm
    drawn["mtp.fc.weight"] = np.eye(width, 2 * width) + rng.normal(0.0, head_noise / width**0.5, (width, 2 * width))
    return {key: value.astype(np.float32) for key, value in drawn.items()}


def write(
    directory: Path,
    *,
    with_head: bool = True,
    with_tokenizer: bool = True,
    head_noise: float = 0.15,
    **overrides: Any,
) -> Path:
    """A checkpoint directory as it might be downloaded."""
    made = config(**overrides)
    drawn = tensors(made, head_noise=head_noise)
    kept = {key: value for key, value in drawn.items() if with_head or not key.startswith("mtp.")}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(made.to_hf()))
    for name in TOKENIZER_FILES if with_tokenizer else ():
        shutil.copyfile(demo_file(name), directory / name)
    return directory
