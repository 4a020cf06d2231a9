"""What a checkpoint says about its shapes, and how our own TOML files become dataclasses.

In goes a published `config.json` (nested or flat), out comes `ModelConfig`: the text side of Qwen3.5 and
its MTP head, fields named as Hugging Face names them. Whatever the file says that this code cannot do is
refused by name; `load_toml` is as strict with the TOML files in `configs/`.
"""

import dataclasses
import difflib
import importlib.resources
import json
import logging
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

logger = logging.getLogger(__name__)

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

# Fields that are read under their own name and have no default: a file that lacks one is refused.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)

# Keys that `from_hf` reads from the wrapper, and from the text config.
_WRAPPER = frozenset({"model_type", "text_config", "tie_word_embeddings", "eos_token_id", "quantization_config"})
_TEXT = frozenset(_REQUIRED) | {
    "model_type",
    "num_hidden_layers",
    "layer_types",
    "full_attention_interval",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "output_gate_type",
    "mtp_num_hidden_layers",
    "eos_token_id",
    "quantization_config",
}

# Keys that change nothing here: vision and its token ids, training-only values, bookkeeping of transformers.
_IGNORED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "image_token_id",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "language_model_only",
        "mlp_only_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)

# Keys that name a mechanism, with the values that switch it off or mean the one we have. Absent is fine.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_chunk_size": (None,),
    "attention_dropout": (0, None),
    "attn_output_gate": (True,),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "hidden_act": ("silu",),
    "mamba_ssm_dtype": ("float32",),
    "mlp_bias": (False, None),
    "mtp_use_dedicated_embeddings": (False, None),
    "sliding_window": (None, 0),
    "use_sliding_window": (False, None),
}

# Parts of key names that belong to mechanisms we lack; such a key must be null, false, zero or empty.
_LACKED = {
    "expert": "mixture of experts",
    "moe": "mixture of experts",
    "router": "mixture of experts",
    "softcap": "logit soft caps",
    "soft_cap": "logit soft caps",
    "logit_scale": "scaled logits",
    "logits_scal": "scaled logits",
    "_multiplier": "scaled residuals or embeddings",
    "sliding_window": "sliding-window attention",
    "lora_rank": "latent attention",
    "sink": "attention sinks",
}

_ROPE_TYPES = ("default", "mrope")
_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
}
# "swish" is how the published 3.6 files spell silu.
_OUTPUT_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of the text model and its MTP head; fields carry their Hugging Face names.

    Raises:
      ValueError: from the constructor, if two fields contradict each other; the message has both numbers.
    """

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # F
    layer_types: tuple[str, ...]  # "linear_attention" (Gated DeltaNet) or "full_attention", one a layer
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    output_gate_type: str  # gate of the Gated DeltaNet output norm: "silu" or "sigmoid"
    num_mtp_layers: int  # 0 or 1
    eos_token_ids: tuple[int, ...]  # what config.json says; chat turns may end with further ids

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                low = 0 if field.name == "num_mtp_layers" else 1
                _check(type(value) is int and value >= low, f"{field.name}={value!r} must be an integer >= {low}")
            if field.type is float:
                _check(type(value) in (int, float) and value > 0, f"{field.name}={value!r} must be a number > 0")
            if field.type is bool:
                _check(type(value) is bool, f"{field.name}={value!r} must be true or false")
        n, kv = self.num_attention_heads, self.num_key_value_heads
        nk, nv = self.linear_num_key_heads, self.linear_num_value_heads
        _check(len(self.layer_types) > 0, "layer_types is empty; a model has at least one layer")
        for kind in self.layer_types:
            _check(
                kind in (LINEAR_ATTENTION, FULL_ATTENTION),
                f"layer_types contains {kind!r}; supported: {LINEAR_ATTENTION!r}, {FULL_ATTENTION!r}",
            )
        _check(n % kv == 0, f"num_attention_heads={n} must be divisible by num_key_value_heads={kv}")
        _check(nv % nk == 0, f"linear_num_value_heads={nv} must be divisible by linear_num_key_heads={nk}")
        rotary, head = self.rotary_dim, self.head_dim
        _check(
            rotary % 2 == 0 and 0 < rotary <= head,
            f"head_dim={head} * partial_rotary_factor={self.partial_rotary_factor} gives {rotary} "
            f"rotary dimensions, which must be an even number in 2..{head}",
        )
        _check(
            self.output_gate_type in ("silu", "sigmoid"),
            f"output_gate_type={self.output_gate_type!r} is not supported; supported: 'silu', 'sigmoid'",
        )
        _check(
            self.num_mtp_layers <= 1,
            f"num_mtp_layers={self.num_mtp_layers} is not supported; supported: 0, 1",
        )
        for token in self.eos_token_ids:
            _check(
                type(token) is int and 0 <= token < self.vocab_size,
                f"eos_token_ids contains {token!r}, which is outside vocab_size={self.vocab_size}",
            )

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers L of the trunk."""
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a query or key head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Width of all Gated DeltaNet keys (or queries) of a token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all Gated DeltaNet values of a token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels C of the causal convolution: queries, keys and values, in this order."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a parsed `config.json`, the nested (`text_config`) or the flat (`qwen3_5_text`) form.

        Unknown keys are logged together, once. Nothing falls back to the class defaults of transformers.

        Raises:
          ValueError: naming every missing key, or the key and value of a mechanism that this code lacks.
        """
        text = _text_config(hf)
        _refuse_lacked(hf, text)
        unknown = unknown_keys(hf)
        if unknown:
            logger.warning("config.json: unknown keys, ignored: %s", ", ".join(unknown))
        rope = _rope(text)
        has_pattern = bool(text.get("layer_types") or text.get("full_attention_interval"))
        found = [
            *((key, text.get(key) is not None) for key in (*_REQUIRED, "num_hidden_layers")),
            ("layer_types (or full_attention_interval)", has_pattern),
            ("rope_parameters.rope_theta", "rope_theta" in rope),
            ("rope_parameters.partial_rotary_factor", "partial_rotary_factor" in rope),
        ]
        missing = [key for key, present in found if not present]
        _check(not missing, f"config.json: missing {', '.join(missing)}")
        layers = text["num_hidden_layers"]
        kinds = text.get("layer_types") or _pattern(layers, text["full_attention_interval"])
        _check(len(kinds) == layers, f"len(layer_types)={len(kinds)} must equal num_hidden_layers={layers}")
        gate = text.get("output_gate_type") or "silu"
        eos = text.get("eos_token_id", hf.get("eos_token_id"))
        tie = text.get("tie_word_embeddings", hf.get("tie_word_embeddings"))
        config = cls(
            **{key: text[key] for key in _REQUIRED},
            layer_types=tuple(kinds),
            rope_theta=float(rope["rope_theta"]),
            partial_rotary_factor=float(rope["partial_rotary_factor"]),
            tie_word_embeddings=False if tie is None else tie,
            output_gate_type=_OUTPUT_GATES.get(gate, gate),
            num_mtp_layers=text.get("mtp_num_hidden_layers") or 0,
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        )
        section, pairs = rope.get("mrope_section"), config.rotary_dim // 2
        _check(
            section is None or sum(section) == pairs,
            f"rope_parameters.mrope_section={section} must sum to rotary_dim / 2 = {pairs}",
        )
        return config

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Reads `directory/config.json`.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: as `from_hf`, or if the file is not a JSON object.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; a checkpoint directory has a config.json")
        return cls.from_hf(_json_object(path.read_text(encoding="utf-8"), str(path)))

    @classmethod
    def preset(cls, name: str) -> Self:
        """A published model by name, for instance `"qwen3.5-27b"`; `preset_names()` lists them all.

        Raises:
          ValueError: if there is no such preset; the message has the nearest name and all of them.
        """
        if name not in preset_names():
            raise ValueError(f"unknown preset {name!r}{_nearest(name, preset_names())}")
        file = _presets() / f"{name}.json"
        return cls.from_hf(_json_object(file.read_text(encoding="utf-8"), file.name))

    @classmethod
    def tiny(cls, num_hidden_layers: int = 4, **overrides: Any) -> Self:
        """A small model with the 27B's ratios: 3:1 layers, grouped queries, three value heads a key head.

        Every fourth layer is full attention, unless `layer_types` says otherwise.
        """
        fields: dict[str, Any] = dict(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            layer_types=_pattern(num_hidden_layers, 4),
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            rms_norm_eps=1e-6,
            rope_theta=10_000_000.0,
            partial_rotary_factor=0.25,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            output_gate_type="silu",
            num_mtp_layers=1,
            eos_token_ids=(511,),
        )
        return cls(**fields | overrides)

    def to_hf(self) -> dict[str, Any]:
        """The published nested layout; `from_hf` reads it back unchanged, and transformers accepts it."""
        pairs = self.rotary_dim // 2
        eos = self.eos_token_ids
        text = {
            "model_type": "qwen3_5_text",
            **{key: getattr(self, key) for key in _REQUIRED},
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "attention_bias": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "mamba_ssm_dtype": "float32",
            "output_gate_type": self.output_gate_type,
            "mtp_num_hidden_layers": self.num_mtp_layers,
            "mtp_use_dedicated_embeddings": False,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                # Time, height and width take turns at the pairs: [11, 11, 10] of 32.
                "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3],
                "mrope_interleaved": True,
            },
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
        }


def preset_names() -> tuple[str, ...]:
    """Names that `ModelConfig.preset` knows, sorted."""
    return tuple(
        sorted(file.name.removesuffix(".json") for file in _presets().iterdir() if file.name.endswith(".json"))
    )


def unknown_keys(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a parsed `config.json`, sorted, that `from_hf` neither reads nor knows to be harmless."""
    text = _text_config(hf)
    prefix = "text_config." if text is not hf else ""
    harmless = _IGNORED | set(_ONLY)
    unknown = {prefix + key for key in text if key not in _TEXT | harmless}
    if text is not hf:
        unknown |= {key for key in hf if key not in _WRAPPER | harmless}
    return tuple(sorted(unknown))


def _presets() -> Any:
    return importlib.resources.files("configs") / "model"


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return (f", did you mean {close[0]!r}?" if close else ";") + f" known: {', '.join(known) or 'none'}"


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    _check(isinstance(value, dict), f"{name} must hold a JSON object, got {type(value).__name__}")
    return value


def _pattern(num_layers: int, interval: int) -> tuple[str, ...]:
    for name, value in (("num_hidden_layers", num_layers), ("full_attention_interval", interval)):
        _check(type(value) is int and value > 0, f"{name}={value!r} must be an integer >= 1")
    return tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(num_layers))


def _text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    text = hf.get("text_config", hf)
    _check(isinstance(text, Mapping), f"text_config must be an object, got {type(text).__name__}")
    return text


def _refuse_lacked(hf: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    kinds = ("qwen3_5", "qwen3_5_text") if text is hf else ("qwen3_5",)
    kind = hf.get("model_type")
    _check(kind in kinds, f"model_type={kind!r} is not supported; supported: {', '.join(map(repr, kinds))}")
    kind = text.get("model_type", "qwen3_5_text")
    _check(
        text is hf or kind == "qwen3_5_text",
        f"text_config.model_type={kind!r} is not supported; supported: 'qwen3_5_text'",
    )
    for source in (hf, text):
        for key, value in source.items():
            if key in _ONLY:
                supported = ", ".join(map(repr, _ONLY[key]))
                _check(value in _ONLY[key], f"{key}={value!r} is not supported; supported: {supported}")
            elif key not in _WRAPPER | _TEXT | _IGNORED:
                for part, mechanism in _LACKED.items():
                    _check(part not in key or not value, f"{key}={value!r} is not supported: no {mechanism} here")
        _refuse_quantization(source.get("quantization_config"))
    layers = text.get("mtp_num_hidden_layers") or 0
    _check(layers in (0, 1), f"mtp_num_hidden_layers={layers!r} is not supported; supported: 0, 1")
    gate = text.get("output_gate_type") or "silu"
    known = ", ".join(map(repr, _OUTPUT_GATES))
    _check(gate in _OUTPUT_GATES, f"output_gate_type={gate!r} is not supported; supported: {known}")


def _refuse_quantization(quantization: Any) -> None:
    if not quantization:
        return
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    _check(
        method == "fp8" and isinstance(block, Sequence) and len(block) == 2,
        f"quantization_config with quant_method={method!r}, weight_block_size={block!r} is not supported; "
        "supported: 'fp8' with a two-dimensional weight_block_size such as [128, 128]",
    )


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    # Older exports have `rope_scaling`, and the numbers beside it.
    rope = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if text.get(key) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        table = {key: value for key, value in (text.get(name) or {}).items() if value is not None}
        kind = table.get("rope_type", table.get("type", "default"))
        supported = ", ".join(map(repr, _ROPE_TYPES))
        _check(kind in _ROPE_TYPES, f"{name}.rope_type={kind!r} is not supported; supported: {supported}")
        for key, value in table.items():
            supported = ", ".join(sorted(_ROPE_KEYS))
            _check(key in _ROPE_KEYS, f"{name}.{key}={value!r} is not supported; supported: {supported}")
        rope |= table
    return rope


def load_toml[T](cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Reads a TOML file into `cls`, a frozen dataclass; its tables become the dataclasses of its fields.

    Args:
      cls: field types may be int, float, str, bool, Path, a dataclass, `Literal`, `X | None`, `tuple[X, ...]`
        and `dict[str, X]`. An int is accepted where a float is asked for; nothing else is converted.
      path: the file.
      overrides: `"a.b=value"` each, applied in order; a value that is not TOML is a string.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: on bad TOML, an unknown key (naming the nearest known one), a missing key or a wrong type.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    for override in overrides:
        _override(table, override)
    return _convert(cls, table, "", str(path))


def _override(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    _check(bool(name and equals), f"override {override!r} must look like key=value or table.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = name.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        _check(isinstance(table, dict), f"override {override!r}: {parent!r} is not a table")
    table[last] = value


def _convert(kind: Any, value: Any, name: str, path: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _build(kind, value, name, path)
    if origin is typing.Literal:
        _check(value in args, f"{path}: {name}={value!r} must be one of {', '.join(map(repr, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        # TOML has no null, so `X | None` is an X that may be left out.
        (kind,) = (arg for arg in args if arg is not types.NoneType)
        return _convert(kind, value, name, path)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(args[0], item, f"{name}[{i}]", path) for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _convert(args[1], item, f"{name}.{key}", path) for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    _check(type(value) is kind, f"{path}: {name}={value!r} must be {getattr(kind, '__name__', kind)}")
    return value


def _build(cls: Any, table: dict[str, Any], name: str, path: str) -> Any:
    prefix = f"{name}." if name else ""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in table:
        _check(key in fields, f"{path}: unknown key {prefix + key!r}{_nearest(key, fields)}")
    required = (
        field.name
        for field in fields.values()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    missing = [prefix + key for key in required if key not in table]
    _check(not missing, f"{path}: missing {', '.join(missing)}")
    values = {key: _convert(hints[key], value, prefix + key, path) for key, value in table.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
