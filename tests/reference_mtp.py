#!/usr/bin/env python3
"""Makes tests/data/mtp.json: logits of blocks for multi-token prediction of tiny random models, in 64 bits.

    pip install numpy
    python tests/reference_mtp.py

Written from the published code: the block from vLLM's `qwen3_next_mtp.py`, `glm4_moe_mtp.py` and `deepseek_mtp.py`, its layer
from transformers' `modeling_qwen3_5.py`, `modeling_glm4_moe.py` and `modeling_deepseek_v3.py`. Two things are llama.cpp's
(`graph_mtp`): the state that the block hands on is the one behind its last norm, and the first token is not masked.

Models are those of tests/data/shapes.json, of which one gets a block here; weights, and the hidden states that come with the
tokens, are the hash of `reference_values.py`. `first` are the logits behind the tokens; `second` those behind the most
probable next token, with the block's own state.
"""

import json
import math
import pathlib

import numpy as np

from reference_values import values

DATA = pathlib.Path(__file__).parent / "data"
N_TOKENS = 12


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Block:
    def __init__(self, line):
        arch = line["metadata"]["general.architecture"]
        self.arch, self.meta = arch, {key.removeprefix(f"{arch}."): x for key, x in line["metadata"].items()}
        self.i = self.meta["block_count"] - 1
        self.dims = {name.replace("*", str(i)): dims for name, dims, layers in line["tensors"] for i in layers}

    def tensor(self, name):
        return values(name, self.dims[name]).astype(np.float64)

    def of(self, part):
        return self.tensor(f"blk.{self.i}.{part}")

    def has(self, part):
        return f"blk.{self.i}.{part}" in self.dims

    def linear(self, part, x):
        y = x @ self.of(f"{part}.weight").T
        return y + self.of(f"{part}.bias") if self.has(f"{part}.bias") else y

    def norm(self, w, x):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.meta["attention.layer_norm_rms_epsilon"]) * w

    def angles(self, n):
        """Cosines and sines, `(n, pairs)`, and the factor of YaRN on scores."""
        base, dim = self.meta["rope.freq_base"], self.meta["rope.dimension_count"]
        frequencies, factor = base ** -(np.arange(0, dim, 2) / dim), 1.0
        if self.meta.get("rope.scaling.type") == "yarn":
            stretch, n_orig = self.meta["rope.scaling.factor"], self.meta["rope.scaling.original_context_length"]
            pair = lambda turns: dim * math.log(n_orig / (turns * 2 * math.pi)) / (2 * math.log(base))
            low = max(math.floor(pair(self.meta["rope.scaling.yarn_beta_fast"])), 0)
            high = min(math.ceil(pair(self.meta["rope.scaling.yarn_beta_slow"])), dim - 1)
            ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
            frequencies = frequencies / stretch * ramp + frequencies * (1 - ramp)
            # Its factor on cosines is `mscale / mscale_all_dim`, which is 1 in these models.
            factor = (1 + self.meta["rope.scaling.yarn_log_multiplier"] * math.log(stretch)) ** 2
        angles = np.arange(n)[:, None] * frequencies
        return np.cos(angles), np.sin(angles), factor

    def rotate(self, x, halves):
        """`(n, heads, width)`: the first dimensions, in pairs of halves or of neighbours."""
        cos, sin, _ = self.angles(len(x))
        dim = self.meta["rope.dimension_count"]
        a, b = (x[..., : dim // 2], x[..., dim // 2 : dim]) if halves else (x[..., 0:dim:2], x[..., 1:dim:2])
        cos, sin = cos[:, None], sin[:, None]
        out = x.copy()
        a, b = a * cos - b * sin, b * cos + a * sin
        if halves:
            out[..., : dim // 2], out[..., dim // 2 : dim] = a, b
        else:
            out[..., 0:dim:2], out[..., 1:dim:2] = a, b
        return out

    def attend(self, q, k, v, scale):
        """`(n, heads, width)` each; later tokens are not seen."""
        n, group = len(q), q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) * scale + np.triu(np.full((n, n), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1)

    def attention(self, x):
        n, n_head, n_kv = len(x), self.meta["attention.head_count"], self.meta["attention.head_count_kv"]
        width = self.meta["attention.key_length"]
        q = self.linear("attn_q", x).reshape(n, n_head, -1)
        # Qwen has a gate behind each head's queries.
        q, gate = q[..., :width], q[..., width:].reshape(n, -1)
        k, v = (self.linear(f"attn_{part}", x).reshape(n, n_kv, -1) for part in "kv")
        q, k = self.norm(self.of("attn_q_norm.weight"), q), self.norm(self.of("attn_k_norm.weight"), k)
        out = self.attend(self.rotate(q, True), self.rotate(k, True), v, width**-0.5)
        return self.linear("attn_output", out * sigmoid(gate) if gate.size else out)

    def latent_attention(self, x):
        n, n_head, width = len(x), self.meta["attention.head_count"], self.meta["attention.key_length_mla"]
        n_rot, rank = self.meta["rope.dimension_count"], self.meta["attention.kv_lora_rank"]
        q = self.norm(self.of("attn_q_a_norm.weight"), self.linear("attn_q_a", x))
        q = self.linear("attn_q_b", q).reshape(n, n_head, width)
        kv = self.linear("attn_kv_a_mqa", x)
        latent = self.norm(self.of("attn_kv_a_norm.weight"), kv[:, :rank])
        k_plain = np.einsum("nr,hrd->nhd", latent, self.of("attn_k_b.weight"))
        v = np.einsum("nr,hdr->nhd", latent, self.of("attn_v_b.weight"))
        k_rot = np.repeat(self.rotate(kv[:, None, rank:], False), n_head, 1)
        q = np.concatenate([q[..., : width - n_rot], self.rotate(q[..., width - n_rot :], False)], -1)
        factor = self.angles(1)[2]
        return self.linear(
            "attn_output", self.attend(q, np.concatenate([k_plain, k_rot], -1), v, width**-0.5 * factor)
        )

    def mlp(self, x, end=""):
        gate, up = self.linear(f"ffn_gate{end}", x), self.linear(f"ffn_up{end}", x)
        return self.linear(f"ffn_down{end}", silu(gate) * up)

    def mixture(self, x):
        n_used, n_group = self.meta["expert_used_count"], self.meta["expert_group_count"]
        scores = sigmoid(self.linear("ffn_gate_inp", x))
        gate, up, down = (self.of(f"ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        out = self.mlp(x, "_shexp")
        for row, score, y in zip(x, scores, out):
            choice = score + self.of("exp_probs_b.bias")
            groups = choice.reshape(n_group, -1)
            best = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1))[: self.meta["expert_group_used_count"]]
            masked = np.full_like(groups, -np.inf)
            masked[best] = groups[best]
            chosen = np.argsort(-masked.reshape(-1))[:n_used]
            weights = score[chosen] / score[chosen].sum() * self.meta["expert_weights_scale"]
            for e, weight in zip(chosen, weights):
                y += weight * (down[e] @ (silu(gate[e] @ row) * (up[e] @ row)))
        return out

    def run(self, tokens, states):
        """The block's states behind its last norm, and its logits."""
        embedded = self.tensor("token_embd.weight")[tokens]
        normed = [self.norm(self.of("nextn.enorm.weight"), embedded), self.norm(self.of("nextn.hnorm.weight"), states)]
        x = self.linear("nextn.eh_proj", np.concatenate(normed, -1))
        attention = self.latent_attention if self.has("attn_kv_a_mqa.weight") else self.attention
        x = x + attention(self.norm(self.of("attn_norm.weight"), x))
        name = "ffn_norm" if self.has("ffn_norm.weight") else "post_attention_norm"
        inner = self.norm(self.of(f"{name}.weight"), x)
        x = x + (self.mixture(inner) if self.has("ffn_gate_inp.weight") else self.mlp(inner))
        states = self.norm(self.of("nextn.shared_head_norm.weight"), x)
        return states, states @ self.tensor("output.weight" if "output.weight" in self.dims else "token_embd.weight").T


def with_block(line):
    """The model with a block like its last layer."""
    arch = line["metadata"]["general.architecture"]
    i, n = line["metadata"][f"{arch}.block_count"], line["metadata"][f"{arch}.embedding_length"]
    line["metadata"] |= {f"{arch}.block_count": i + 1, f"{arch}.nextn_predict_layers": 1}
    for name, _, layers in line["tensors"]:
        if name.startswith("blk.") and i - 1 in layers:
            layers.append(i)
    line["tensors"].append(["blk.*.nextn.eh_proj.weight", [2 * n, n], [i]])
    for part in ["enorm", "hnorm", "shared_head_norm"]:
        line["tensors"].append([f"blk.*.nextn.{part}.weight", [n], [i]])
    return line | {"name": line["name"] + "-mtp"}


def main():
    lines = {line["name"]: line for line in map(json.loads, (DATA / "shapes.json").read_text().splitlines())}
    out = []
    for line in [lines["glm4moe-mtp"], lines["qwen35-mtp"], with_block(lines["deepseek3"])]:
        block = Block(line)
        n_embd, n_vocab = block.meta["embedding_length"], block.dims["token_embd.weight"][1]
        tokens = [(i * i * 7 + i * 3 + 1) % n_vocab for i in range(N_TOKENS)]
        states = values("states", [n_embd, N_TOKENS]).astype(np.float64)
        own, first = block.run(tokens, states)
        _, second = block.run(tokens + [int(first[-1].argmax())], np.concatenate([states, own[-1:]]))
        rounded = lambda row: [float(f"{x:.9g}") for x in row]
        out.append(line | {"tokens": tokens, "first": rounded(first[-1]), "second": rounded(second[-1])})
    (DATA / "mtp.json").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in out))


main()
