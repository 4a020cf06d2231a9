"""Makes the stored reference outputs with transformers, and checks an exported checkpoint against them.

Runs in an environment of its own (README.md beside this file); the project needs neither torch nor this script.
The first command writes NAME.npz for the named configs, or for all; the second exits with 1 if a logit of an
exported checkpoint differs by more than 1e-4.

    python tests/goldens/make_goldens.py make [NAME ...]
    python tests/goldens/make_goldens.py check_export NAME DIR [DIR ...]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5TextModel

HERE = Path(__file__).parent
SEED = 0
# Every length is a pass of its own, so that the ends of the reference's chunks of 64 fall where it puts them.
LENGTHS = (1, 5, 63, 64, 65, 130, 300)
# Positions whose rows are kept from the longest pass: both sides of each chunk edge, and a spread.
POSITIONS = (
    0,
    1,
    2,
    3,
    7,
    15,
    31,
    *range(62, 67),
    100,
    *range(127, 131),
    *range(191, 194),
    255,
    256,
    298,
    299,
)
# The head drafts three tokens after this many.
PROMPT_LENGTH, NUM_DRAFT_TOKENS = 130, 3
TOLERANCE = 1e-4


def load_causal_lm(directory: Path) -> torch.nn.Module:
    """The text model in float32, eager attention; raises when a tensor is missing, unexpected or misshapen."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    _require_clean(report, directory)
    return model.eval()


def load_composite(directory: Path) -> torch.nn.Module:
    """The image-and-text class over the same files, with a toy vision tower: the files may carry none."""
    config = AutoConfig.from_pretrained(directory)
    vision = config.vision_config
    vision.depth, vision.num_heads, vision.num_position_embeddings = 1, 2, 16
    vision.hidden_size, vision.intermediate_size = 16, 16
    vision.out_hidden_size = config.text_config.hidden_size
    model, report = Qwen3_5ForConditionalGeneration.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    _require_clean(report, directory, ignore="model.visual.")
    return model.eval()


def _require_clean(report: dict[str, Any], directory: Path, ignore: str | None = None) -> None:
    for kind, names in report.items():
        names = [name if isinstance(name, str) else name[0] for name in names]
        names = [name for name in names if ignore is None or not name.startswith(ignore)]
        if names:
            raise ValueError(f"{directory}: {kind}: {', '.join(map(str, names[:5]))} ({len(names)} in all)")


@torch.no_grad()
def outputs(model: torch.nn.Module, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states after the final norm [T, D] and logits [T, V] of one sequence, float32."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0].numpy(), model.lm_head(hidden)[0].numpy()


class MTPHead(torch.nn.Module):
    """The head out of the reference's parts, for it has none: a one-layer text model that ends in mtp.norm."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray], embed: torch.nn.Module):
        super().__init__()
        weights = {name: torch.from_numpy(value) for name, value in tensors.items()}
        text = Qwen3_5TextConfig(
            **config["text_config"] | {"num_hidden_layers": 1, "layer_types": [tiny_checkpoints.FULL]}
        )
        text._attn_implementation = "eager"
        self.embed, self.fc = embed, weights["mtp.fc.weight"]
        self.norms = []
        for side in ("embedding", "hidden"):
            norm = Qwen3_5RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
            norm.load_state_dict({"weight": weights[f"mtp.pre_fc_norm_{side}.weight"]})
            self.norms.append(norm)
        self.layer = Qwen3_5TextModel(text).float().eval()
        state = {
            name.removeprefix("mtp."): value
            for name, value in weights.items()
            if name.startswith(("mtp.layers.", "mtp.norm."))
        }
        self.layer.load_state_dict({**state, "embed_tokens.weight": embed.weight})

    @torch.no_grad()
    def forward(self, next_token_ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """Normed output [T, D]; row p reads token p+1 and hidden p."""
        embedding = self.embed(torch.from_numpy(next_token_ids.astype(np.int64)))
        halves = [norm(x) for norm, x in zip(self.norms, (embedding, torch.from_numpy(hidden)), strict=True)]
        x = torch.cat(halves, dim=-1) @ self.fc.T
        return self.layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0].numpy()


def recursion(head: MTPHead, token_ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Outputs of the drafting steps [k, D] after a prompt; they read the tokens that follow it, not their own."""
    hidden = hidden[:PROMPT_LENGTH]
    for step in range(NUM_DRAFT_TOKENS):
        output = head(token_ids[1 : PROMPT_LENGTH + step + 1], hidden)[-1:]
        hidden = np.concatenate([hidden, output])
    return hidden[PROMPT_LENGTH:]


def make(name: str) -> None:
    config = tiny_checkpoints.CONFIGS[name]
    tensors = tiny_checkpoints.tensors(config, SEED)
    token_ids = tiny_checkpoints.token_ids(config, max(LENGTHS), SEED)
    with tempfile.TemporaryDirectory() as directory:
        model = load_causal_lm(tiny_checkpoints.write_checkpoint(directory, config, tensors))
    rows = {length: outputs(model, token_ids[:length]) for length in LENGTHS}
    hidden, logits = rows[max(LENGTHS)]
    head = MTPHead(config, tensors, model.model.embed_tokens)
    positions = np.array(POSITIONS)
    np.savez_compressed(
        HERE / f"{name}.npz",
        seed=np.int64(SEED),
        weight_checksums=tiny_checkpoints.checksums(tensors),
        token_ids=token_ids,
        positions=positions,
        hidden=hidden[positions],
        logits=logits[positions],
        lengths=np.array(LENGTHS),
        last_hidden=np.stack([rows[length][0][-1] for length in LENGTHS]),
        last_logits=np.stack([rows[length][1][-1] for length in LENGTHS]),
        # The last row has no next token and reads the first one.
        mtp_hidden=head(np.roll(token_ids, -1), hidden)[positions],
        prompt_length=np.int64(PROMPT_LENGTH),
        draft_hidden=recursion(head, token_ids, hidden),
    )
    size = (HERE / f"{name}.npz").stat().st_size
    print(f"{name:26s} {type(model).__name__} max |logit| {np.abs(logits).max():.2f}  {size / 1e3:.0f} kB")


def check_export(name: str, directory: Path) -> float:
    """Largest |logit difference| from the arrays of golden `name`, over the classes that read `directory`."""
    with np.load(HERE / f"{name}.npz") as golden:
        golden = dict(golden)
    loaders = [load_causal_lm]
    if "text_config" in json.loads((directory / "config.json").read_text()):
        loaders.append(load_composite)
    worst = 0.0
    for loader in loaders:
        model = loader(directory)
        _, logits = outputs(model, golden["token_ids"])
        difference = np.abs(logits[golden["positions"]] - golden["logits"]).max()
        for length, row in zip(golden["lengths"], golden["last_logits"], strict=True):
            _, logits = outputs(model, golden["token_ids"][:length])
            difference = max(difference, np.abs(logits[-1] - row).max())
        print(f"{directory}: {type(model).__name__}: max |logit difference| {difference:.3g}")
        # Not max(): a NaN must not pass for agreement.
        worst = difference if not difference <= worst else worst
    return float(worst)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    make_parser = commands.add_parser("make")
    make_parser.add_argument("names", nargs="*", metavar="NAME")
    check_parser = commands.add_parser("check_export")
    check_parser.add_argument("name", choices=tiny_checkpoints.CONFIGS)
    check_parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    arguments = parser.parse_args()

    # One thread: tiny matmuls lose more to waiting threads than they gain.
    torch.set_num_threads(1)
    if arguments.command == "make":
        for name in arguments.names or tiny_checkpoints.CONFIGS:
            make(name)
        return 0
    worst = [check_export(arguments.name, directory) for directory in arguments.directories]
    return 0 if all(difference <= TOLERANCE for difference in worst) else 1


if __name__ == "__main__":
    sys.exit(main())
