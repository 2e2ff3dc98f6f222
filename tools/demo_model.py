"""The demo model's network: llama as GGUF lays it out, so that export is a copy."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab: int = 3840
    dim: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ff: int = 768
    ctx: int = 512
    eps: float = 1e-5
    theta: float = 10000.0


def rope_table(c):
    freq = c.theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    angle = torch.arange(c.ctx, dtype=torch.float64)[:, None] * freq
    return torch.stack([angle.cos(), angle.sin()]).float()


def rope(x, table):
    # Adjacent pairs, as llama.cpp rotates architecture "llama": Q and K need no permutation.
    cos, sin = table[:, : x.shape[-2]]
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.c = c
        self.attn_norm = nn.Parameter(torch.ones(c.dim))
        self.attn_q = linear(c.dim, c.heads * c.head_dim)
        self.attn_k = linear(c.dim, c.kv_heads * c.head_dim)
        self.attn_v = linear(c.dim, c.kv_heads * c.head_dim)
        self.attn_output = linear(c.heads * c.head_dim, c.dim)
        self.ffn_norm = nn.Parameter(torch.ones(c.dim))
        self.ffn_gate = linear(c.dim, c.ff)
        self.ffn_up = linear(c.dim, c.ff)
        self.ffn_down = linear(c.ff, c.dim)
        for m in self.children():
            nn.init.normal_(m.weight, std=m.in_features ** -0.5)
        nn.init.zeros_(self.attn_output.weight)
        nn.init.zeros_(self.ffn_down.weight)

    def forward(self, x, table, mask, drop):
        c, (b, t, _) = self.c, x.shape
        h = F.rms_norm(x, (c.dim,), self.attn_norm, c.eps)
        split = lambda y, n: y.view(b, t, n, c.head_dim).transpose(1, 2)
        q = rope(split(self.attn_q(h), c.heads), table)
        k = rope(split(self.attn_k(h), c.kv_heads), table)
        v = split(self.attn_v(h), c.kv_heads)
        k, v = (y.repeat_interleave(c.heads // c.kv_heads, 1) for y in (k, v))
        # Written out: on a CPU at this length it beats torch's fused attention.
        y = (q @ k.mT * c.head_dim ** -0.5 + mask).softmax(-1).to(v.dtype) @ v
        y = self.attn_output(y.transpose(1, 2).reshape(b, t, -1))
        x = x + F.dropout(y, drop, self.training)
        h = F.rms_norm(x, (c.dim,), self.ffn_norm, c.eps)
        y = self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return x + F.dropout(y, drop, self.training)


class Model(nn.Module):
    def __init__(self, c, drop=0.0):
        super().__init__()
        self.c, self.drop = c, drop
        self.token_embd = nn.Embedding(c.vocab, c.dim)
        nn.init.normal_(self.token_embd.weight, std=0.02)
        self.blk = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.output_norm = nn.Parameter(torch.ones(c.dim))
        self.register_buffer("table", rope_table(c), persistent=False)

    def forward(self, ids):
        x = F.dropout(self.token_embd(ids), self.drop, self.training)
        t = ids.shape[1]
        mask = torch.full((t, t), -torch.inf).triu(1)
        for b in self.blk:
            x = b(x, self.table, mask, self.drop)
        # The output shares the embedding: a fifth of the file.
        return F.linear(F.rms_norm(x, (self.c.dim,), self.output_norm, self.c.eps), self.token_embd.weight)
