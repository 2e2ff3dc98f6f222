#!/usr/bin/env python3
"""Makes tests/data/encoders.json and tests/data/encoder_decoder.json: tiny encoders, and a T5 of the first version, in variants that
the reference data lacks, and what they compute, in float64 by the formulas of Hugging Face's modules, written out here.

    pip install numpy
    python tests/reference_encoders.py

Weights are hashes of the names of tensors (`reference_values.py`).
"""

import json
import math
import pathlib

import numpy as np

from reference_values import values

DATA = pathlib.Path(__file__).parent / "data"
N_EMBD, N_HEAD, HEAD, N_FF, N_VOCAB, N_LAYER, N_BUCKET = 64, 4, 16, 96, 32, 2, 32
TOKENS = [(i * i * 7 + i * 3 + 1) % N_VOCAB for i in range(24)]
POSITIONS = [0, 2, 6, 10, 14, 18, 21, 23]


class Weights:
    """Tensors by name, with the shapes that were asked for."""

    def __init__(self):
        self.shapes = {}

    def __call__(self, name, *dims):
        self.shapes[name] = list(dims)
        return values(name, list(dims)).astype(np.float64)

    def linear(self, name, x, n_out, bias=False):
        y = x @ self(f"{name}.weight", x.shape[1], n_out).T
        return y + self(f"{name}.bias", n_out) if bias else y


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def heads(x):
    return x.reshape(len(x), -1, HEAD).transpose(1, 0, 2)


def attend(q, k, v, scores):
    """Heads together; `scores` changes the products of queries and keys."""
    o = softmax(scores(heads(q) @ heads(k).transpose(0, 2, 1))) @ heads(v)
    return o.transpose(1, 0, 2).reshape(len(q), -1)


def jina_code():
    """jina-embeddings-v2-base-code: layer norms of all query and key heads together, and a second norm of each layer's input and
    output of attention (huggingface.co/jinaai/jina-bert-v2-qk-post-norm; llama.cpp `models/bert.cpp`)."""
    w = Weights()

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        n = x.shape[1]
        return x * w(f"{name}.weight", n) + w(f"{name}.bias", n)

    gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))
    slopes = np.array([2.0 ** (-8 * (i + 1) / N_HEAD) for i in range(N_HEAD)])
    n = len(TOKENS)
    distance = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :])
    x = w("token_embd.weight", N_EMBD, N_VOCAB)[TOKENS] + w("token_types.weight", N_EMBD, 2)[0]
    x = norm("token_embd_norm", x)
    for i in range(N_LAYER):
        b = f"blk.{i}."
        q, k, v = (w.linear(f"{b}attn_{part}", x, N_EMBD, True) for part in "qkv")
        q, k = norm(f"{b}attn_q_norm", q), norm(f"{b}attn_k_norm", k)
        o = attend(q, k, v, lambda s: s / math.sqrt(HEAD) - slopes[:, None, None] * distance)
        y = norm(f"{b}attn_output_norm", x + w.linear(f"{b}attn_output", o, N_EMBD, True))
        x = norm(f"{b}attn_norm_2", x + y)
        both = w.linear(f"{b}ffn_up", x, 2 * N_FF)
        y = w.linear(f"{b}ffn_down", gelu(both[:, :N_FF]) * both[:, N_FF:], N_EMBD, True)
        x = norm(f"{b}layer_output_norm", x + y)
    keys = {"block_count": N_LAYER, "context_length": 128, "embedding_length": N_EMBD, "feed_forward_length": N_FF, "attention.head_count": N_HEAD,
            "attention.layer_norm_epsilon": 1e-5, "attention.causal": False, "pooling_type": 1}
    return entry("jina-bert-v2", keys, w, pooled=[x.mean(0)])


def bucket(distance, n):
    """Hugging Face's `T5Attention._relative_position_bucket`, of one direction."""
    if distance < n // 2:
        return distance
    share = np.log(np.float32(distance) / np.float32(n // 2)) / np.float32(math.log(128 / (n // 2)))
    return min(n - 1, n // 2 + int(share * np.float32(n - n // 2)))


def t5_half(w, prefix, x, memory=None):
    """The layers of an encoder, or of a decoder beside a memory."""
    def norm(name, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w(f"{name}.weight", N_EMBD)

    n, causal = len(x), memory is not None
    bias = w(f"{prefix}blk.0.attn_rel_b.weight", N_HEAD, N_BUCKET)
    of = np.full((N_HEAD, n, n), -np.inf)
    for query in range(n):
        for key in range(query + 1 if causal else n):
            half = N_BUCKET if causal else N_BUCKET // 2
            at = bucket(abs(query - key), half) + (half if key > query else 0)
            of[:, query, key] = bias[at]
    for i in range(N_LAYER):
        b = f"{prefix}blk.{i}."
        y = norm(f"{b}attn_norm", x)
        q, k, v = (w.linear(f"{b}attn_{part}", y, N_HEAD * HEAD) for part in "qkv")
        x = x + w.linear(f"{b}attn_o", attend(q, k, v, lambda s: s + of), N_EMBD)
        if causal:
            q = w.linear(f"{b}cross_attn_q", norm(f"{b}cross_attn_norm", x), N_HEAD * HEAD)
            k, v = (w.linear(f"{b}cross_attn_{part}", memory, N_HEAD * HEAD) for part in "kv")
            x = x + w.linear(f"{b}cross_attn_o", attend(q, k, v, lambda s: s), N_EMBD)
        y = w.linear(f"{b}ffn_up", norm(f"{b}ffn_norm", x), N_FF)
        x = x + w.linear(f"{b}ffn_down", np.maximum(y, 0), N_EMBD)
    return norm(f"{prefix}output_norm", x)


T5_KEYS = {"block_count": N_LAYER, "context_length": 128, "embedding_length": N_EMBD, "feed_forward_length": N_FF, "attention.head_count": N_HEAD,
           "attention.key_length": HEAD, "attention.value_length": HEAD, "attention.layer_norm_epsilon": 1e-6,
           "attention.layer_norm_rms_epsilon": 1e-6, "attention.relative_buckets_count": N_BUCKET}


def t5_encoder():
    w = Weights()
    x = t5_half(w, "enc.", w("token_embd.weight", N_EMBD, N_VOCAB)[TOKENS])
    return entry("t5encoder", T5_KEYS, w, pooled=[x.mean(0)])


def t5():
    """The first version of T5: ReLU, and a head that is the embedding table."""
    w = Weights()
    embd = w("token_embd.weight", N_EMBD, N_VOCAB)
    memory = t5_half(w, "enc.", embd[TOKENS[::-1]])
    x = t5_half(w, "dec.", embd[TOKENS], memory)
    logits = (x / math.sqrt(N_EMBD)) @ embd.T
    return entry("t5", {**T5_KEYS, "decoder_block_count": N_LAYER, "decoder_start_token_id": 1}, w, logits=logits[POSITIONS])


def entry(arch, keys, w, **rows):
    rows = {kind: [[round(float(x), 5) for x in row] for row in of] for kind, of in rows.items()}
    return {"architecture": arch, "metadata": {f"{arch}.{key}": value for key, value in keys.items()}, "tensors": w.shapes, **rows}


def write(name, models):
    models = {"about": {"tokens": TOKENS, "positions": POSITIONS}, **models}
    lines = [f"{json.dumps(name)}: {json.dumps(model, separators=(',', ':'))}" for name, model in models.items()]
    (DATA / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


write("encoders.json", {"jina-bert-v2-code": jina_code(), "t5encoder": t5_encoder()})
write("encoder_decoder.json", {"t5": t5()})
