"""Float64 numpy twin of the trunk and the MTP head: one sequence, serial recurrences, no cache, no project code.

Functions take a `text_config` dict, a mapping from HF tensor name to array, and [T, ...] arrays without a batch
axis. Written from the published formulas, to be read beside them; slow on purpose.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]

TRUNK = "model.language_model."


class _Scope:
    """The tensors under one prefix, widened to float64 as they are read."""

    def __init__(self, weights: Weights, prefix: str):
        self.weights, self.prefix = weights, prefix

    def __getitem__(self, name: str) -> Array:
        return self.weights[self.prefix + name].astype(np.float64)

    def linear(self, name: str, x: Array) -> Array:
        return x @ self[f"{name}.weight"].T

    def norm(self, name: str, x: Array, eps: float) -> Array:
        """RMS norm whose stored weight is zero-centred."""
        return rms(x, eps) * (1.0 + self[f"{name}.weight"])

    def below(self, prefix: str) -> "_Scope":
        return _Scope(self.weights, self.prefix + prefix)


def rms(x: Array, eps: float) -> Array:
    """x over its root mean square along the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def unit(x: Array) -> Array:
    """x over its length along the last axis: the sum of squares, not their mean."""
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def rotate(x: Array, positions: Array, text: Mapping[str, Any]) -> Array:
    """Rotary embedding of x [T, heads, H] at positions [T]; dims past the rotary ones pass through.

    Text has equal positions on all three axes, so the interleaved sections make no difference and are not used.
    """
    rope = text["rope_parameters"]
    half = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    angles = np.outer(positions, rope["rope_theta"] ** -(np.arange(half) / half))[:, None, :]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attention(x: Array, weights: _Scope, text: Mapping[str, Any], positions: Array) -> Array:
    """Gated full attention, causal over the rows of x [T, D]."""
    length, head_dim = len(x), text["head_dim"]
    queries, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    query, gate = np.split(weights.linear("q_proj", x).reshape(length, queries, 2 * head_dim), 2, axis=-1)
    key = weights.linear("k_proj", x).reshape(length, kv_heads, head_dim)
    value = weights.linear("v_proj", x).reshape(length, kv_heads, head_dim)
    query = rotate(weights.norm("q_norm", query, text["rms_norm_eps"]), positions, text)
    key = rotate(weights.norm("k_norm", key, text["rms_norm_eps"]), positions, text)

    out = np.empty_like(query)
    for head in range(queries):
        kv_head = head // (queries // kv_heads)
        scores = query[:, head] @ key[:, kv_head].T / np.sqrt(head_dim)
        scores[np.triu_indices(length, 1)] = -np.inf
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = odds @ value[:, kv_head] / odds.sum(axis=-1, keepdims=True)
    return weights.linear("o_proj", (out * sigmoid(gate)).reshape(length, -1))


def causal_conv(x: Array, weight: Array, window: Array | None = None) -> Array:
    """Depthwise causal convolution of x [T, C] with weight [C, W], whose last tap meets the current row.

    `window` [W-1, C] is what came before; zeros when absent.
    """
    channels, width = weight.shape
    before = np.zeros((width - 1, channels)) if window is None else window
    rows = np.concatenate([before, x])
    return np.stack([np.sum(rows[t : t + width].T * weight, axis=-1) for t in range(len(x))])


def gated_delta_rule(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """The recurrence itself, a token at a time: outputs [T, heads, dv] and the last state [heads, dk, dv].

    query and key [T, heads, dk] come normalised (and the query scaled) and repeated to the value heads; value
    is [T, heads, dv]; g (log decay) and beta are [T, heads]; `state` defaults to zeros.
    """
    length, heads, key_dim = key.shape
    value_dim = value.shape[-1]
    state = np.zeros((heads, key_dim, value_dim)) if state is None else np.array(state, np.float64)
    out = np.empty((length, heads, value_dim))
    for t in range(length):
        decayed = np.exp(g[t])[:, None, None] * state
        update = beta[t][:, None] * (value[t] - np.einsum("hkv,hk->hv", decayed, key[t]))
        state = decayed + np.einsum("hk,hv->hkv", key[t], update)
        out[t] = np.einsum("hkv,hk->hv", state, query[t])
    return out, state


def delta_net(x: Array, weights: _Scope, text: Mapping[str, Any]) -> Array:
    """Gated DeltaNet over the rows of x [T, D], from an empty state."""
    length = len(x)
    key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    mixed = silu(causal_conv(weights.linear("in_proj_qkv", x), weights["conv1d.weight"][:, 0]))
    query, key, value = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=-1)
    # Value head j reads key head j // repeat.
    repeat = value_heads // key_heads
    query = unit(query.reshape(length, key_heads, key_dim)).repeat(repeat, axis=1) / np.sqrt(key_dim)
    key = unit(key.reshape(length, key_heads, key_dim)).repeat(repeat, axis=1)
    value = value.reshape(length, value_heads, value_dim)
    beta = sigmoid(weights.linear("in_proj_b", x))
    g = -np.exp(weights["A_log"]) * np.logaddexp(0.0, weights.linear("in_proj_a", x) + weights["dt_bias"])

    out, _ = gated_delta_rule(query, key, value, g, beta)
    z = weights.linear("in_proj_z", x).reshape(out.shape)
    out = rms(out, text["rms_norm_eps"]) * weights["norm.weight"] * silu(z)
    return weights.linear("out_proj", out.reshape(length, -1))


def decoder_layer(x: Array, weights: _Scope, text: Mapping[str, Any], kind: str, positions: Array) -> Array:
    """One residual block of either kind over x [T, D]."""
    eps = text["rms_norm_eps"]
    h = weights.norm("input_layernorm", x, eps)
    if kind == "full_attention":
        x = x + attention(h, weights.below("self_attn."), text, positions)
    else:
        x = x + delta_net(h, weights.below("linear_attn."), text)
    h, mlp = weights.norm("post_attention_layernorm", x, eps), weights.below("mlp.")
    return x + mlp.linear("down_proj", silu(mlp.linear("gate_proj", h)) * mlp.linear("up_proj", h))


def trunk(token_ids: Array, tensors: Weights, text: Mapping[str, Any]) -> Array:
    """Hidden states after the final norm [T, D]."""
    weights = _Scope(tensors, TRUNK)
    x = weights["embed_tokens.weight"][token_ids]
    for index, kind in enumerate(text["layer_types"]):
        x = decoder_layer(x, weights.below(f"layers.{index}."), text, kind, np.arange(len(token_ids)))
    return weights.norm("norm", x, text["rms_norm_eps"])


def unembed(hidden: Array, tensors: Weights) -> Array:
    """Logits [..., V]; the embedding serves when there is no `lm_head`."""
    name = "lm_head.weight" if "lm_head.weight" in tensors else TRUNK + "embed_tokens.weight"
    return hidden @ tensors[name].astype(np.float64).T


def mtp(next_token_ids: Array, hidden: Array, tensors: Weights, text: Mapping[str, Any]) -> Array:
    """The head's normed output [T, D]. Row p reads token p+1 and hidden p; its logits predict token p+2."""
    weights, eps = _Scope(tensors, "mtp."), text["rms_norm_eps"]
    embedding = _Scope(tensors, TRUNK)["embed_tokens.weight"][next_token_ids]
    first = weights.norm("pre_fc_norm_embedding", embedding, eps)
    second = weights.norm("pre_fc_norm_hidden", hidden, eps)
    x = weights.linear("fc", np.concatenate([first, second], axis=-1))
    x = decoder_layer(x, weights.below("layers.0."), text, "full_attention", np.arange(len(x)))
    return weights.norm("norm", x, eps)


def draft(
    token_ids: Array,
    num_draft_tokens: int,
    tensors: Weights,
    text: Mapping[str, Any],
    fed: Array | None = None,
) -> tuple[int, Array, Array]:
    """Greedy next token of a prompt, then the recursive chain: drafts [k] and the head's normed outputs [k, D].

    Each step appends one row to the head's sequence: the newest token with the last true hidden state at first,
    with the head's own last output after that. `fed` [k] replaces the tokens that the steps read (the next token,
    then the drafts but the last), so that a chain can be followed whatever a near-tie would choose.
    """
    hidden = trunk(token_ids, tensors, text)
    next_token = int(np.argmax(unembed(hidden[-1], tensors)))
    tokens, newest = token_ids[1:], next_token
    drafts, outputs = [], []
    for step in range(num_draft_tokens):
        tokens = np.append(tokens, newest if fed is None else fed[step])
        outputs.append(mtp(tokens, hidden, tensors, text)[-1])
        newest = int(np.argmax(unembed(outputs[-1], tensors)))
        drafts.append(newest)
        hidden = np.concatenate([hidden, outputs[-1][None]])
    return next_token, np.array(drafts), np.stack(outputs)
