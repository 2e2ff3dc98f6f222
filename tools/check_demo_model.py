#!/usr/bin/env python3
"""Check the demo model's GGUF against the network it was trained as.

    python3 tools/check_demo_model.py models/ruvllm-rust-6m-q8_0.gguf [WORKDIR [CORPUS.jsonl]]

Runs the file in NumPy by llama.cpp's rules, from what the file says alone, and compares logits with
the torch network of demo_model.py carrying the same dequantised weights; with WORKDIR also with the
weights before quantisation. Then measures loss on models/demo-heldout.txt: BOS and 255 tokens at a
time, each token predicted once; with CORPUS.jsonl also on all held-out pages and on as many training
ones. Needs gguf, numpy, tokenizers and torch.
"""
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from demo_model import Config, Model


class Gguf:
    def __init__(self, path):
        r = gguf.GGUFReader(path)
        self.kv = {k: f.contents() for k, f in r.fields.items()}
        self.w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in r.tensors}

    def tokenizer(self):
        tokens = self.kv["tokenizer.ggml.tokens"]
        merges = [tuple(m.split(" ")) for m in self.kv["tokenizer.ggml.merges"]]
        tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tok.decoder = decoders.ByteLevel()
        return tok

    def logits(self, ids):
        key = lambda k: self.kv["llama." + k]
        heads, kv_heads, rot = key("attention.head_count"), key("attention.head_count_kv"), key("rope.dimension_count")
        t = len(ids)
        angle = np.arange(t)[:, None] * key("rope.freq_base") ** (-np.arange(0, rot, 2) / rot)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

        def norm(x, name):
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + key("attention.layer_norm_rms_epsilon")) * self.w[name]

        def rope(x):
            out = np.empty_like(x)
            out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
            out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
            return out

        x = self.w["token_embd.weight"][ids].astype(np.float64)
        for i in range(key("block_count")):
            part = lambda h, n: h @ self.w[f"blk.{i}.{n}.weight"].T
            h = norm(x, f"blk.{i}.attn_norm.weight")
            q = rope(part(h, "attn_q").reshape(t, heads, rot))
            k = rope(part(h, "attn_k").reshape(t, kv_heads, rot))
            v = part(h, "attn_v").reshape(t, kv_heads, rot)
            mixed = np.empty_like(q)
            for n in range(heads):
                g = n * kv_heads // heads
                s = q[:, n] @ k[:, g].T / np.sqrt(rot)
                s = np.exp(np.where(np.tri(t, dtype=bool), s - s.max(-1, keepdims=True), -np.inf))
                mixed[:, n] = s / s.sum(-1, keepdims=True) @ v[:, g]
            x = x + part(mixed.reshape(t, -1), "attn_output")
            h = norm(x, f"blk.{i}.ffn_norm.weight")
            gate = part(h, "ffn_gate")
            x = x + part(gate / (1 + np.exp(-gate)) * part(h, "ffn_up"), "ffn_down")
        return norm(x, "output_norm.weight") @ self.w["token_embd.weight"].T


def torch_model(weights, config=Config()):
    m = Model(config).eval()
    m.load_state_dict({n: torch.tensor(weights[n if n in weights else n + ".weight"])
                       for n in m.state_dict()})
    return lambda ids: m(torch.as_tensor(ids)[None])[0].detach().double().numpy()


def loss(forward, ids):
    total = 0.0
    for i in range(0, len(ids), 255):
        chunk = ids[i : i + 255]
        z = forward(np.array([0, *chunk[:-1]]))
        z = z - z.max(-1, keepdims=True)
        total += (np.log(np.exp(z).sum(-1)) - z[np.arange(len(chunk)), chunk]).sum()
    return total / len(ids)


def main():
    torch.set_num_threads(1)
    g = Gguf(sys.argv[1])
    tok = g.tokenizer()
    text = (Path(__file__).parent.parent / "models/demo-heldout.txt").read_bytes().decode()
    ids = tok.encode(text).ids
    assert tok.decode(ids) == text, "the tokeniser does not round-trip"
    sample = np.array([0, *ids[:255]])
    mine = g.logits(sample)

    same = torch_model(g.w)
    error = np.abs(mine - same(sample)).max()
    print(f"NumPy against torch, same weights: largest logit difference {error:.2e}")
    assert error < 1e-2
    runs = {"the file": g.logits}
    if len(sys.argv) > 2:
        saved = torch.load(Path(sys.argv[2]) / "model.pt", weights_only=False)
        before = torch_model({n: t.numpy() for n, t in saved["model"].items()}, Config(**saved["config"]))
        diff = mine - before(sample)
        print(f"NumPy against torch before quantisation: rms {np.sqrt((diff ** 2).mean()):.3f}, "
              f"largest {np.abs(diff).max():.3f}, same best token in "
              f"{(mine.argmax(-1) == before(sample).argmax(-1)).mean():.1%}")
        reference = Tokenizer.from_file(str(Path(sys.argv[2]) / "tokenizer.json"))
        assert reference.encode(text).ids == ids, "the file's tokeniser differs from the trained one"
        runs["before quantisation"] = before
    for name, forward in runs.items():
        nats = loss(forward, ids)
        print(f"demo-heldout.txt, {name}: {len(ids)} tokens, {len(text.encode())} bytes, "
              f"{nats:.4f} nats/token, {nats * len(ids) / len(text.encode()):.4f} nats/byte, perplexity {np.exp(nats):.2f}")
    if len(sys.argv) > 3:
        docs = [json.loads(line) for line in open(sys.argv[3])]
        for split in ("heldout", "train"):
            pages = [d["text"] for d in docs if d["split"] == split]
            text = "\n".join(pages if split == "heldout" else pages[:: len(pages) // 100])
            ids = tok.encode(text).ids
            print(f"{split} pages: {len(text.encode())} bytes, {loss(same, ids) * len(ids) / len(text.encode()):.4f} nats/byte")


if __name__ == "__main__":
    main()
