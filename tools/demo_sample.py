#!/usr/bin/env python3
"""Continue a prompt with the demo model, greedily and by sampling, for its card.

    python3 tools/demo_sample.py models/ruvllm-rust-6m-q8_0.gguf "Ownership is" ...
"""
import sys

import numpy as np
import torch

from check_demo_model import Gguf, torch_model

TOKENS, SEED = 80, 1


def continue_(forward, ids, temperature, top_p, penalty, rng):
    ids = list(ids)
    for _ in range(TOKENS):
        z = forward(np.array([0, *ids]))[-1]
        for t in set(ids[-64:]) if penalty != 1 else ():
            z[t] = z[t] / penalty if z[t] > 0 else z[t] * penalty
        if temperature == 0:
            t = int(z.argmax())
        else:
            p = np.exp((z - z.max()) / temperature)
            p /= p.sum()
            order = np.argsort(-p)
            p[order[np.cumsum(p[order]) - p[order] >= top_p]] = 0
            t = int(rng.choice(len(p), p=p / p.sum()))
        if t == 0:
            break
        ids.append(t)
    return ids


def main():
    torch.set_num_threads(1)
    g = Gguf(sys.argv[1])
    tok, forward = g.tokenizer(), torch_model(g.w)
    for prompt in sys.argv[2:]:
        for label, temperature, top_p, penalty in (("greedy", 0, 1, 1), ("greedy, repeat penalty 1.1", 0, 1, 1.1),
                                                   ("temperature 0.8, top-p 0.95", 0.8, 0.95, 1),
                                                   ("temperature 0.7, top-p 0.9, repeat penalty 1.05", 0.7, 0.9, 1.05)):
            ids = continue_(forward, tok.encode(prompt).ids, temperature, top_p, penalty, np.random.default_rng(SEED))
            print(f"\n**{label}**\n\n{tok.decode(ids)}")


if __name__ == "__main__":
    main()
