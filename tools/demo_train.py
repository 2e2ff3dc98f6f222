#!/usr/bin/env python3
"""Train the demo model: tokeniser first, then the network, both on the training split alone.

    python3 tools/demo_train.py CORPUS.jsonl WORKDIR --minutes 65      # torch, tokenizers, numpy

Writes WORKDIR/tokenizer.json, WORKDIR/model.pt (best so far) and WORKDIR/log.txt.
"""
import argparse
import os

# Two workers of one thread each, not one of two: on a shared machine a thread that waits at every
# operation for its descheduled partner does nothing else.
os.environ.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="0")
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model import Config, Model

EOT = "<|endoftext|>"


def train_tokenizer(texts, vocab):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's split
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOT], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return tok


def stream(tok, texts):
    """Documents end to end, each behind the end-of-text token (id 0)."""
    return np.concatenate([np.array([0, *e.ids], np.int64) for e in tok.encode_batch(texts)])


def windows(data, length, rng):
    """One epoch: the stream cut at a fresh phase. Every window is put behind BOS, as a prompt is."""
    cuts = np.arange(rng.integers(length), len(data) - length, length)
    rng.shuffle(cuts)
    for o in cuts:
        w = data[o : o + length]
        yield np.concatenate([[0], w[:-1]]), w


@torch.no_grad()
def heldout_loss(model, ids, length=256):
    """Nats per predicted token: chunks of BOS and `length - 1` tokens, each token predicted once."""
    total, body = 0.0, length - 1
    chunks = [ids[i : i + body] for i in range(0, len(ids), body)]
    for i in range(0, len(chunks), 16):
        y = torch.full((len(chunks[i : i + 16]), body), -100)
        for row, c in zip(y, chunks[i : i + 16]):
            row[: len(c)] = torch.from_numpy(c)
        x = F.pad(y.clamp(min=0), (1, 0))[:, :-1]
        total += F.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), reduction="sum").item()
    return total / len(ids)


def orthogonal(g):
    """Newton-Schulz, as in Muon: the nearest orthogonal matrix, roughly, for a stack of matrices."""
    tall = g.shape[-2] > g.shape[-1]
    x = (g.mT if tall else g).bfloat16()
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum whose step is orthogonalised; far more is learnt per token than with AdamW."""

    def __init__(self, params, decay):
        self.decay, self.groups = decay, {}
        for p in params:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.m = {s: torch.zeros(len(ps), *s) for s, ps in self.groups.items()}

    @torch.no_grad()  # which is per thread, so it has to be said here
    def step(self, shape, grads, lr):
        g, m = torch.stack(grads), self.m[shape]
        m.lerp_(g, 0.05)
        u = orthogonal(g.lerp_(m, 0.95)) * max(1, shape[0] / shape[1]) ** 0.5
        for p, d in zip(self.groups[shape], u):
            p.mul_(1 - lr * self.decay).sub_(d, alpha=lr)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("corpus")
    a.add_argument("out", type=Path)
    a.add_argument("--minutes", type=float, default=65)
    a.add_argument("--batch", type=int, default=16, help="windows of half the context per step")
    a.add_argument("--lr", type=float, default=0.02)
    a.add_argument("--embd-lr", type=float, default=0.004)
    a.add_argument("--decay", type=float, default=0.1)
    a.add_argument("--drop", type=float, default=0.0)
    a.add_argument("--flat", type=float, default=0.4, help="share of the time before the rate falls")
    a.add_argument("--eval-every", type=int, default=200)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--init", type=Path, help="weights to go on from, a model.pt of an earlier run")
    a.add_argument("--max-steps", type=int, default=10**9)
    a = a.parse_args()
    torch.manual_seed(a.seed)
    rng = np.random.default_rng(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)

    docs = [json.loads(line) for line in open(a.corpus)]
    part = {s: [d["text"] for d in docs if d["split"] == s] for s in ("train", "heldout")}
    rng.shuffle(part["train"])
    c = Config()
    tok = train_tokenizer(part["train"], c.vocab)
    tok.save(str(a.out / "tokenizer.json"))
    data = {s: stream(tok, t) for s, t in part.items()}
    size = {s: sum(len(t.encode()) for t in ts) for s, ts in part.items()}
    # Loss is counted on the stream, whose end-of-text tokens stand for no byte of the text.
    per_byte = {s: len(data[s]) / size[s] for s in data}
    # The first part of the held-out stream is enough to steer by; the card's figures use all of it.
    probe = data["heldout"][:30000]

    model = Model(c, a.drop)
    if a.init:
        model.load_state_dict(torch.load(a.init, weights_only=False)["model"])
    matrices = [p for b in model.blk for p in b.parameters() if p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1 or n.startswith("token_embd")]
    muon = Muon(matrices, a.decay)
    adam = torch.optim.AdamW(rest, lr=a.embd_lr, betas=(0.9, 0.95), weight_decay=0.01)
    log = open(a.out / "log.txt", "a", buffering=1)

    def say(*words):
        print(*words, flush=True)
        print(*words, file=log)

    say(vars(a), "parameters", sum(p.numel() for p in model.parameters()),
        *(f"{s}: {len(data[s])} tokens, {size[s]} bytes" for s in data))

    params = list(model.parameters())

    def work(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        # Left in bfloat16: the rounding is noise beside the batch's, and a tenth of the time is saved.
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return loss.item(), torch.autograd.grad(loss, params)

    pool = ThreadPoolExecutor(2, initializer=lambda: torch.set_num_threads(1))
    now = start = time.monotonic()
    deadline, progress, step, best, recent = start + 60 * a.minutes, 0.0, 0, math.inf, []
    feed, epoch, length = iter(()), 0, c.ctx // 2
    while progress < 0.995 and step < a.max_steps:
        rows = []
        # Half the context costs less and learns nearly as much; the last quarter learns the rest.
        if progress > 0.75 and length < c.ctx:
            feed, length = iter(()), c.ctx
        while len(rows) < a.batch * c.ctx // (2 * length):
            row = next(feed, None)
            if row is None:
                feed, epoch = windows(data["train"], length, rng), epoch + 1
                continue
            rows.append(row)
        x, y = (torch.from_numpy(np.stack(part)) for part in zip(*rows))
        rate = min(1, (step + 1) / 100) * min(1, (1 - progress) / (1 - a.flat))
        model.train()
        losses, grads = zip(*pool.map(work, x.chunk(2), y.chunk(2)))
        grad = {id(p): (g + h) / 2 for p, g, h in zip(params, *grads)}
        list(pool.map(lambda s: muon.step(s, [grad[id(p)] for p in muon.groups[s]], a.lr * rate), muon.groups))
        for p in rest:
            p.grad = grad[id(p)]
        adam.param_groups[0]["lr"] = a.embd_lr * rate
        adam.step()
        step += 1
        recent.append(sum(losses) / 2)
        # What is left of the schedule is spread over what is left of the time, so a process that
        # was stopped for a while anneals faster instead of jumping.
        took, now = time.monotonic() - now, time.monotonic()
        progress += (1 - progress) * min(1, min(took, 10) / max(deadline - now, 20 * min(took, 2)))
        if step % 20 == 0 and step % a.eval_every:
            print(step, f"{np.mean(recent[-20:]):.3f}", f"{took:.2f}s", flush=True)
        if step % a.eval_every == 0 or progress >= 0.995:
            model.eval()
            with torch.autocast("cpu", torch.bfloat16):
                held = heldout_loss(model, probe)
            train = float(np.mean(recent[-a.eval_every:]))
            say(f"step {step} epoch {epoch} minutes {(now - start) / 60:.1f} cpu {time.process_time() / 60:.1f} "
                f"rate {rate:.3f} train {train:.4f} ({train * per_byte['train']:.4f}/byte) "
                f"held-out {held:.4f} ({held * per_byte['heldout']:.4f}/byte) {took:.2f} s/step")
            if held < best:
                best = held
                torch.save({"config": c.__dict__, "step": step, "held": held, "args": vars(a),
                            "model": model.state_dict()}, a.out / "model.tmp")
                (a.out / "model.tmp").rename(a.out / "model.pt")
            now = time.monotonic()


if __name__ == "__main__":
    main()
