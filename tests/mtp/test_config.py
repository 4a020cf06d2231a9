"""The config reader against published files, wrong files and other models' files; and strict TOML."""

import copy
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import AutoConfig, Qwen3_5Config, Qwen3_5TextConfig

from mtp.config import ModelConfig, load_toml, preset_names, unknown_keys

# Text and MTP parameters as counted over the published tensors, a tied embedding once.
PARAMETERS = {
    "qwen3.5-0.8b": (752_393_024, 20_452_864),
    "qwen3.5-2b": (1_881_825_088, 60_828_160),
    "qwen3.5-4b": (4_205_751_296, 120_599_552),
    "qwen3.5-9b": (8_953_803_264, 243_290_624),
    "qwen3.5-27b": (26_895_998_464, 424_699_392),
    "qwen3.6-27b": (26_895_998_464, 424_699_392),
    "qwen3.8-27b": (26_895_998_464, 424_699_392),
}


def published(name: str = "qwen3.5-27b") -> dict[str, Any]:
    return json.loads(Path(f"configs/model/{name}.json").read_text())


def with_text(**changes: Any) -> dict[str, Any]:
    hf = published()
    hf["text_config"] |= changes
    return hf


def without(*keys: str) -> dict[str, Any]:
    hf = published()
    for key in keys:
        del hf["text_config"][key]
    return hf


def count_parameters(c: ModelConfig) -> tuple[int, int]:
    """Text and MTP parameters, written down from the list of published tensors."""
    d, f = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    common = 2 * d + 3 * d * f
    full = 2 * q * d + 2 * kv * d + q * d + 2 * c.head_dim
    heads = c.linear_num_value_heads
    conv = c.conv_channels
    linear = conv * d + c.value_dim * d + 2 * heads * d + conv * c.linear_conv_kernel_dim
    linear += 2 * heads + c.linear_value_head_dim + c.value_dim * d
    embeddings = c.vocab_size * d * (1 if c.tie_word_embeddings else 2)
    mixers = {"full_attention": full, "linear_attention": linear}
    text = embeddings + d + sum(common + mixers[kind] for kind in c.layer_types)
    return text, c.num_mtp_layers * (2 * d * d + 3 * d + common + full)


def test_presets_are_the_published_models_and_the_demo() -> None:
    assert preset_names() == tuple(sorted([*PARAMETERS, "demo"]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset(name: str) -> None:
    config = ModelConfig.preset(name)
    assert count_parameters(config) == PARAMETERS[name]
    assert unknown_keys(published(name)) == ()
    assert config.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert config.tie_word_embeddings == (name in ("qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b"))
    assert (config.rotary_dim, config.max_position_embeddings, config.eos_token_ids) == (
        64,
        262144,
        (248044,),
    )


def test_27b_field_by_field() -> None:
    assert ModelConfig.preset("qwen3.5-27b") == ModelConfig(
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 16,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        output_gate_type="silu",
        num_mtp_layers=1,
        eos_token_ids=(248044,),
    )


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'qwen-3.5-9b', did you mean 'qwen3.5-9b'\? known: demo, qwen3.5-0.8b, "):
        ModelConfig.preset("qwen-3.5-9b")


@pytest.mark.parametrize(
    "config",
    [
        *map(ModelConfig.preset, PARAMETERS),
        ModelConfig.tiny(),
        ModelConfig.tiny(output_gate_type="sigmoid", tie_word_embeddings=True, num_mtp_layers=0, eos_token_ids=()),
        ModelConfig.tiny(eos_token_ids=(7, 3), num_hidden_layers=5, head_dim=20, partial_rotary_factor=0.5),
    ],
)
def test_to_hf_round_trip_and_transformers(config: ModelConfig, tmp_path: Path) -> None:
    hf = json.loads(json.dumps(config.to_hf()))
    assert unknown_keys(hf) == ()
    assert ModelConfig.from_hf(hf) == config
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert ModelConfig.from_pretrained(tmp_path) == config

    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, Qwen3_5Config)
    text = theirs.text_config
    assert (text.hidden_size, text.num_hidden_layers) == (config.hidden_size, config.num_hidden_layers)
    assert tuple(text.layer_types) == config.layer_types
    assert text.rope_parameters["partial_rotary_factor"] == config.partial_rotary_factor
    assert text.rope_parameters["rope_theta"] == config.rope_theta
    assert sum(text.rope_parameters["mrope_section"]) == config.rotary_dim // 2
    assert theirs.tie_word_embeddings == config.tie_word_embeddings

    # What transformers writes again, as a wrapper and as a text model alone, means the same to us.
    assert ModelConfig.from_hf(json.loads(theirs.to_json_string())) == config
    assert isinstance(text, Qwen3_5TextConfig)
    flat = json.loads(text.to_json_string(use_diff=False))
    assert ModelConfig.from_hf(flat) == config
    assert unknown_keys(flat) == ()


def test_flat_form() -> None:
    hf = published()
    flat = hf["text_config"] | {"tie_word_embeddings": False}
    assert ModelConfig.from_hf(flat) == ModelConfig.from_hf(hf)
    assert ModelConfig.from_hf(flat | {"model_type": "qwen3_5"}) == ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("text", "wrapper", "tied"),
    [
        (True, False, True),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (None, None, False),
    ],
)
def test_tie_rule(text: bool | None, wrapper: bool | None, tied: bool) -> None:
    hf = published()
    del hf["tie_word_embeddings"]
    if text is not None:
        hf["text_config"]["tie_word_embeddings"] = text
    if wrapper is not None:
        hf["tie_word_embeddings"] = wrapper
    assert ModelConfig.from_hf(hf).tie_word_embeddings is tied


def test_layer_types_from_interval() -> None:
    config = ModelConfig.from_hf(without("layer_types"))
    assert config == ModelConfig.preset("qwen3.5-27b")
    hf = without("layer_types")
    hf["text_config"]["full_attention_interval"] = 3
    full = [i for i, kind in enumerate(ModelConfig.from_hf(hf).layer_types) if kind == "full_attention"]
    assert full == list(range(2, 64, 3))


def test_older_rope_layouts() -> None:
    expected = ModelConfig.preset("qwen3.5-27b")
    beside = {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    for scaling in (None, {"type": "default"}, {"type": "mrope", "mrope_section": [11, 11, 10]}):
        hf = without("rope_parameters")
        hf["text_config"] |= beside | {"rope_scaling": scaling}
        assert ModelConfig.from_hf(hf) == expected
    hf = without("rope_parameters")
    hf["text_config"]["rope_scaling"] = {"rope_type": "default"} | beside
    assert ModelConfig.from_hf(hf) == expected


@pytest.mark.parametrize(("eos", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, ())])
def test_eos_token_ids(eos: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(with_text(eos_token_id=eos)).eos_token_ids == expected
    assert ModelConfig.from_hf(without("eos_token_id") | {"eos_token_id": eos}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("gate", "ours"), [("swish", "silu"), ("silu", "silu"), ("sigmoid", "sigmoid"), (None, "silu")]
)
def test_output_gate_type(gate: str | None, ours: str) -> None:
    assert ModelConfig.from_hf(with_text(output_gate_type=gate)).output_gate_type == ours


def test_config_without_mtp_layers() -> None:
    assert ModelConfig.from_hf(without("mtp_num_hidden_layers")).num_mtp_layers == 0


def test_unknown_keys_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    hf = with_text(zebra=1, full_attention_color="blue") | {"aardvark": None}
    assert unknown_keys(hf) == ("aardvark", "text_config.full_attention_color", "text_config.zebra")
    with caplog.at_level(logging.WARNING, logger="mtp.config"):
        ModelConfig.from_hf(hf)
    (record,) = caplog.records
    assert record.getMessage().endswith("aardvark, text_config.full_attention_color, text_config.zebra")
    caplog.clear()
    ModelConfig.from_hf(published())
    assert not caplog.records


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 256),
        ("num_experts_per_tok", 8),
        ("moe_intermediate_size", 512),
        ("shared_expert_intermediate_size", 512),
        ("router_aux_loss_coef", 0.001),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("attention_chunk_size", 8192),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("attention_dropout", 0.1),
        ("attn_output_gate", False),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("residual_multiplier", 0.22),
        ("logit_scale", 0.0625),
        ("kv_lora_rank", 512),
        ("hidden_act", "gelu_pytorch_tanh"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("mtp_num_hidden_layers", 3),
        ("mtp_use_dedicated_embeddings", True),
        ("output_gate_type", "tanh"),
        ("model_type", "qwen3_5_moe_text"),
    ],
)
def test_mechanisms_we_lack_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{key}={value!r} is not supported"):
        ModelConfig.from_hf(with_text(**{key: value}))
    with pytest.raises(ValueError, match=rf"{key}={value!r} is not supported"):
        ModelConfig.from_hf(published()["text_config"] | {key: value})


def test_mechanisms_switched_off_are_accepted() -> None:
    off = {"num_experts": 0, "sliding_window": None, "use_sliding_window": False, "attention_dropout": 0.0}
    assert ModelConfig.from_hf(with_text(**off)) == ModelConfig.preset("qwen3.5-27b")


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next", "llama", None])
def test_other_model_types_are_refused(kind: str | None) -> None:
    with pytest.raises(ValueError, match=f"model_type={kind!r} is not supported; supported: 'qwen3_5'"):
        ModelConfig.from_hf(published() | {"model_type": kind})


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "longrope", "llama3"])
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_other_rope_types_are_refused(kind: str, where: str, name: str) -> None:
    hf = without("rope_parameters")
    hf["text_config"][where] = {name: kind, "factor": 4.0, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    with pytest.raises(ValueError, match=rf"{where}.rope_type='{kind}' is not supported; supported: 'default'"):
        ModelConfig.from_hf(hf)


def test_rope_scaling_beside_rope_parameters_is_not_overlooked() -> None:
    with pytest.raises(ValueError, match=r"rope_scaling.rope_type='yarn' is not supported"):
        ModelConfig.from_hf(with_text(rope_scaling={"type": "yarn", "factor": 4.0}))


def test_rope_factor_without_a_type_is_refused() -> None:
    hf = published()
    hf["text_config"]["rope_parameters"]["factor"] = 4.0
    with pytest.raises(ValueError, match=r"rope_parameters.factor=4.0 is not supported"):
        ModelConfig.from_hf(hf)


def test_quantization() -> None:
    fp8 = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    assert ModelConfig.from_hf(published() | {"quantization_config": fp8}) == ModelConfig.preset("qwen3.5-27b")
    for bad in (
        {"quant_method": "gptq", "bits": 4},
        fp8 | {"weight_block_size": None},
        {"quant_method": "awq"},
    ):
        with pytest.raises(ValueError, match=f"quant_method={bad['quant_method']!r}"):
            ModelConfig.from_hf(published() | {"quantization_config": bad})
        with pytest.raises(ValueError, match="supported: 'fp8'"):
            ModelConfig.from_hf(with_text(quantization_config=bad))


def test_missing_keys_are_named_together() -> None:
    hf = without("hidden_size", "head_dim", "linear_key_head_dim", "layer_types", "full_attention_interval")
    del hf["text_config"]["rope_parameters"]["rope_theta"]
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf(hf)
    assert str(error.value) == (
        "config.json: missing hidden_size, head_dim, linear_key_head_dim, "
        "layer_types (or full_attention_interval), rope_parameters.rope_theta"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads=5 must be divisible by linear_num_key_heads=2",
        ),
        ({"num_attention_heads": 5}, "num_attention_heads=5 must be divisible by num_key_value_heads=2"),
        ({"layer_types": ()}, "layer_types is empty"),
        (
            {"layer_types": ("sliding_attention",) * 4},
            "layer_types contains 'sliding_attention'; supported: ",
        ),
        (
            {"head_dim": 30, "partial_rotary_factor": 0.3},
            r"head_dim=30 \* partial_rotary_factor=0.3 gives 9 ",
        ),
        (
            {"partial_rotary_factor": 2.0},
            r"gives 64 rotary dimensions, which must be an even number in 2..32",
        ),
        ({"partial_rotary_factor": 0.01}, "gives 0 rotary dimensions"),
        ({"hidden_size": 0}, "hidden_size=0 must be an integer >= 1"),
        ({"hidden_size": 64.0}, "hidden_size=64.0 must be an integer >= 1"),
        ({"head_dim": True}, "head_dim=True must be an integer >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be an integer >= 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06 must be a number > 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        (
            {"output_gate_type": "swish"},
            "output_gate_type='swish' is not supported; supported: 'silu', 'sigmoid'",
        ),
        ({"num_mtp_layers": 2}, "num_mtp_layers=2 is not supported"),
        ({"eos_token_ids": (512,)}, "eos_token_ids contains 512, which is outside vocab_size=512"),
    ],
)
def test_contradictions_show_both_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.tiny(**changes)


def test_layer_types_must_be_as_many_as_the_layers() -> None:
    with pytest.raises(ValueError, match=r"len\(layer_types\)=64 must equal num_hidden_layers=32"):
        ModelConfig.from_hf(with_text(num_hidden_layers=32))


def test_mrope_sections_must_fit() -> None:
    hf = published()
    hf["text_config"]["rope_parameters"]["mrope_section"] = [11, 11, 11]
    with pytest.raises(ValueError, match=r"mrope_section=\[11, 11, 11\] must sum to rotary_dim / 2 = 32"):
        ModelConfig.from_hf(hf)


def test_from_pretrained_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    for content, message in (("{", "is not JSON"), ("[]", "must hold a JSON object, got list")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_pretrained(tmp_path)


def test_from_hf_leaves_its_input_alone() -> None:
    hf = published()
    before = copy.deepcopy(hf)
    ModelConfig.from_hf(hf)
    assert hf == before


def test_derived_widths() -> None:
    config = ModelConfig.preset("qwen3.5-27b")
    assert (config.key_dim, config.value_dim, config.conv_channels) == (2048, 6144, 10240)
    tiny = ModelConfig.tiny(num_hidden_layers=9)
    assert tiny.layer_types.count("full_attention") == 2 and hash(tiny) != hash(ModelConfig.tiny())


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float
    betas: tuple[float, ...] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be positive")


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str
    steps: int
    optimizer: Optimizer
    law: Literal["rejection", "block"] = "rejection"
    seed: int | None = None
    shuffle: bool = False
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    out: Path = Path("out")


TOML = """
name = "a"
steps = 10
weights = { code = 1, prose = 0.5 }
[optimizer]
learning_rate = 1
"""


def settings(tmp_path: Path, text: str = TOML, *overrides: str) -> Settings:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return load_toml(Settings, path, overrides)


def test_toml(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    assert loaded == Settings("a", 10, Optimizer(1.0), weights={"code": 1.0, "prose": 0.5})
    assert type(loaded.optimizer.learning_rate) is float


def test_toml_overrides(tmp_path: Path) -> None:
    overrides = [
        "optimizer.learning_rate=3e-4",
        "optimizer.betas=[0.8, 0.9]",
        "name=b c",
        "law=block",
        "seed=3",
    ]
    overrides += ["shuffle=true", "out=x/y", "steps=1", "steps=2", "weights.web=2"]
    loaded = settings(tmp_path, TOML, *overrides)
    assert loaded.optimizer == Optimizer(3e-4, (0.8, 0.9))
    assert (loaded.name, loaded.law, loaded.seed, loaded.shuffle) == ("b c", "block", 3, True)
    assert (loaded.out, loaded.steps, loaded.weights["web"]) == (Path("x/y"), 2, 2.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stesp=3", "unknown key 'stesp', did you mean 'steps'"),
        ("optimizer.learning_rat=3", "unknown key 'optimizer.learning_rat', did you mean 'learning_rate'"),
        ("steps=1.5", "steps=1.5 must be int"),
        ("steps=true", "steps=True must be int"),
        ("name=3", "name=3 must be str"),
        ("shuffle=1", "shuffle=1 must be bool"),
        ("law=greedy", "law='greedy' must be one of 'rejection', 'block'"),
        ("seed=x", "seed='x' must be int"),
        ("optimizer=3", "optimizer=3 must be Optimizer"),
        ("optimizer.betas=3", "optimizer.betas=3 must be"),
        ("optimizer.betas=[1, 'a']", r"optimizer.betas\[1\]='a' must be float"),
        ("weights.code=x", "weights.code='x' must be float"),
        ("optimizer.learning_rate=-1", "settings.toml: learning_rate=-1.0 must be positive"),
        ("steps", "override 'steps' must look like key=value"),
        ("name.x=1", "override 'name.x=1': 'name' is not a table"),
    ],
)
def test_toml_errors(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, TOML, override)


def test_toml_files_that_do_not_load(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing name, steps"):
        settings(tmp_path, "[optimizer]\nlearning_rate = 1.0")
    with pytest.raises(ValueError, match="missing optimizer.learning_rate"):
        settings(tmp_path, "name = 'a'\nsteps = 1\n[optimizer]")
    with pytest.raises(ValueError, match="is not TOML"):
        settings(tmp_path, "name = ")
    with pytest.raises(FileNotFoundError, match="nowhere.toml does not exist"):
        load_toml(Settings, tmp_path / "nowhere.toml")
