"""Reference logits of the tiny models in tests/it/engine.rs, straight from the formulas, in float64.

Run `python3 tests/reference.py` (needs NumPy) to write tests/data/reference.txt again. Weights are a
hash of the tensor's name and the index, so that Rust can make the same ones without a file.
"""

import numpy as np

N_EMBD, N_HEAD, N_KV, HEAD, N_FF, N_VOCAB, N_LAYER, EPS = 64, 4, 2, 16, 96, 50, 2, 1e-5
TOKENS = [1, 17, 4, 42, 9, 9, 33, 0, 28, 5, 49, 12]
MASK = (1 << 64) - 1


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def tensor(name, n_out, n_in, scale, shift=0.0):
    """(n_out, n_in) float32 values in shift ± scale."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & MASK
    values = [(splitmix(seed + i) >> 40) / (1 << 23) - 1.0 for i in range(n_out * n_in)]
    return (np.float32(shift) + np.float32(scale) * np.array(values, np.float32)).reshape(n_out, n_in).astype(np.float64)


def rms(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w


def rope(x, theta, neox):
    """x: (tokens, heads, HEAD)"""
    n = x.shape[-1]
    angle = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(0, n, 2) / n)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = (x[..., : n // 2], x[..., n // 2 :]) if neox else (x[..., 0::2], x[..., 1::2])
    y = np.empty_like(x)
    (first, second) = (slice(0, n // 2), slice(n // 2, n)) if neox else (slice(0, n, 2), slice(1, n, 2))
    y[..., first], y[..., second] = a * c - b * s, a * s + b * c
    return y


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(q, k, v, window=None, cap=0.0):
    t = len(q)
    out = np.zeros_like(q)
    for h in range(N_HEAD):
        s = q[:, h] @ k[:, h // (N_HEAD // N_KV)].T / np.sqrt(HEAD)
        if cap:
            s = cap * np.tanh(s / cap)
        i, j = np.indices((t, t))
        hidden = j > i if window is None else (j > i) | (j <= i - window)
        out[:, h] = softmax(np.where(hidden, -np.inf, s)) @ v[:, h // (N_HEAD // N_KV)]
    return out.reshape(t, -1)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def matrix(name, n_out, n_in):
    return tensor(name + ".weight", n_out, n_in, 1.5 / np.sqrt(n_in))


def norm(name, n=N_EMBD):
    return tensor(name + ".weight", 1, n, 0.25, 1.0)[0]


def qkv(x, p, bias=False):
    y = []
    for part, heads in (("q", N_HEAD), ("k", N_KV), ("v", N_KV)):
        z = x @ matrix(f"{p}attn_{part}", heads * HEAD, N_EMBD).T
        if bias:
            z = z + tensor(f"{p}attn_{part}.bias", 1, heads * HEAD, 0.5)[0]
        y.append(z.reshape(len(x), heads, HEAD))
    return y


def llama():
    x = matrix("token_embd", N_VOCAB, N_EMBD)[TOKENS]
    for i in range(N_LAYER):
        p = f"blk.{i}."
        q, k, v = qkv(rms(x, norm(p + "attn_norm")), p, bias=True)
        a = attend(rope(q, 10000.0, False), rope(k, 10000.0, False), v)
        x = x + a @ matrix(p + "attn_output", N_EMBD, N_HEAD * HEAD).T
        h = rms(x, norm(p + "ffn_norm"))
        g, u = (h @ matrix(f"{p}ffn_{n}", N_FF, N_EMBD).T for n in ("gate", "up"))
        x = x + (silu(g) * u) @ matrix(p + "ffn_down", N_EMBD, N_FF).T
    return rms(x, norm("output_norm")) @ matrix("output", N_VOCAB, N_EMBD).T


def gemma2():
    embd = matrix("token_embd", N_VOCAB, N_EMBD)
    x = embd[TOKENS] * np.sqrt(N_EMBD)
    for i in range(N_LAYER):
        p = f"blk.{i}."
        q, k, v = qkv(rms(x, norm(p + "attn_norm")), p)
        a = attend(rope(q, 10000.0, True), rope(k, 10000.0, True), v, window=4 if i % 2 == 0 else None, cap=5.0)
        x = x + rms(a @ matrix(p + "attn_output", N_EMBD, N_HEAD * HEAD).T, norm(p + "post_attention_norm"))
        h = rms(x, norm(p + "ffn_norm"))
        g, u = (h @ matrix(f"{p}ffn_{n}", N_FF, N_EMBD).T for n in ("gate", "up"))
        x = x + rms((gelu(g) * u) @ matrix(p + "ffn_down", N_EMBD, N_FF).T, norm(p + "post_ffw_norm"))
    logits = rms(x, norm("output_norm")) @ embd.T
    return 10.0 * np.tanh(logits / 10.0)


def qwen3moe():
    n_expert, n_used = 4, 2
    x = matrix("token_embd", N_VOCAB, N_EMBD)[TOKENS]
    for i in range(N_LAYER):
        p = f"blk.{i}."
        q, k, v = qkv(rms(x, norm(p + "attn_norm")), p)
        q, k = rms(q, norm(p + "attn_q_norm", HEAD)), rms(k, norm(p + "attn_k_norm", HEAD))
        a = attend(rope(q, 1000.0, True), rope(k, 1000.0, True), v)
        x = x + a @ matrix(p + "attn_output", N_EMBD, N_HEAD * HEAD).T
        h = rms(x, norm(p + "ffn_norm"))
        probs = softmax(h @ matrix(p + "ffn_gate_inp", n_expert, N_EMBD).T)
        wg, wu = (matrix(f"{p}ffn_{n}_exps", n_expert * N_FF, N_EMBD).reshape(n_expert, N_FF, -1) for n in ("gate", "up"))
        wd = matrix(p + "ffn_down_exps", n_expert * N_EMBD, N_FF).reshape(n_expert, N_EMBD, -1)
        y = np.zeros_like(x)
        for t in range(len(x)):
            top = np.argsort(-probs[t], kind="stable")[:n_used]
            for e in top:
                y[t] += probs[t, e] / probs[t, top].sum() * (wd[e] @ (silu(wg[e] @ h[t]) * (wu[e] @ h[t])))
        x = x + y
    return rms(x, norm("output_norm")) @ matrix("output", N_VOCAB, N_EMBD).T


if __name__ == "__main__":
    with open(__file__.replace("reference.py", "data/reference.txt"), "w") as out:
        for model in (llama, gemma2, qwen3moe):
            out.write(f"{model.__name__}\n")
            for row in model():
                out.write(" ".join(f"{x:.6f}" for x in row) + "\n")
