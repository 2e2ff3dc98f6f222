#!/usr/bin/env python3
"""Makes tests/data/peft/preferences.gguf: losses of training on preferences (DPO, KTO) and with elastic weight
consolidation, by PyTorch in float64 with the Llama and its adapter that `reference_peft.py` made.

    pip install torch transformers peft gguf
    python tests/reference_preferences.py

The formulas are those of the papers (arXiv 2305.18290, 2402.01306, 1612.00796), with what TRL's `KTOTrainer` adds: its
estimate of the divergence takes each prompt with the completion of the example before it. The replay of control text is
that of `src/train/replay.rs`.
"""

import numpy as np
import torch
from gguf import GGUFReader
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy, kl_div, log_softmax, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from reference_peft import EXAMPLES, LINEAR, OUT, SIZES, name_of, write

STEPS = 40
PAIRS = [
    ([1, 17, 4], [42, 9, 9], [5, 6]), ([1, 33, 0, 28], [5], [12, 12, 40]),
    ([1, 12, 7, 7], [8, 30, 2], [8, 31, 2]), ([1, 44], [3, 6, 19, 21], [21, 19, 6, 3]),
]
LABELLED = [
    ([1, 17, 4], [42, 9, 9], True), ([1, 33, 0, 28], [5, 2], False), ([1, 12, 7, 7], [8, 30, 2], True),
    ([1, 44], [3, 6, 19, 21], False), ([1, 2, 3], [4], True),
]
BETA, DESIRABLE, UNDESIRABLE = 0.5, 1.0, 1.5
CONTROL = [(i * i + 3 * i) % 50 for i in range(200)]
WINDOW, MAX_DIVERGENCE, LAMBDA = 64, 0.5, 3.0


def unpermute(w, n_head):
    """Rows of a head from adjacent pairs to halves."""
    return w.reshape(n_head, w.shape[0] // n_head // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def rows(name, w):
    """Output rows as transformers orders them."""
    if "attn_q" in name:
        return unpermute(w, SIZES["num_attention_heads"])
    if "attn_k" in name:
        return unpermute(w, SIZES["num_key_value_heads"])
    return w


def load():
    """The model with its adapter, from the GGUF files."""
    def tensors(path):
        return {t.name: torch.tensor(t.data.reshape([int(n) for n in reversed(t.shape)])) for t in GGUFReader(path).tensors}

    base, lora = tensors(OUT / "llama.gguf"), tensors(OUT / "llama-adapter.gguf")
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).double().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            module, kind = key.rsplit(".", 1)
            name = name_of(module)
            value.copy_(rows(name, base[f"{name}.{kind}"]))
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_modules=LINEAR + ["lm_head"])).double().eval()
    with torch.no_grad():
        for module, part in model.named_modules():
            if hasattr(part, "lora_A") and hasattr(part, "base_layer"):
                name = name_of(module.removeprefix("base_model.model."))
                part.lora_A["default"].weight.copy_(lora[f"{name}.weight.lora_a"])
                part.lora_B["default"].weight.copy_(rows(name, lora[f"{name}.weight.lora_b"]))
    return model


def log_p(model, prompt, completion):
    """Sum of the log-probabilities of the completion's tokens."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1]
    return -cross_entropy(logits, torch.tensor(completion), reduction="sum")


def log_ratio(model, prompt, completion):
    """`r`: against the model without the adapter."""
    with torch.no_grad(), model.disable_adapter():
        reference = log_p(model, prompt, completion)
    return log_p(model, prompt, completion) - reference


def dpo(model):
    margins = [log_ratio(model, x, chosen) - log_ratio(model, x, rejected) for x, chosen, rejected in PAIRS]
    return -logsigmoid(BETA * torch.stack(margins)).mean()


def kto(model):
    with torch.no_grad():
        mismatched = [log_ratio(model, x, LABELLED[i - 1][1]) for i, (x, _, _) in enumerate(LABELLED)]
        z = torch.stack(mismatched).mean().clamp(min=0)
    losses = []
    for x, y, label in LABELLED:
        r = log_ratio(model, x, y)
        value = torch.sigmoid(BETA * (r - z)) if label else torch.sigmoid(BETA * (z - r))
        losses.append((DESIRABLE if label else UNDESIRABLE) * (1 - value))
    return torch.stack(losses).mean()


def sft(model):
    return -sum(log_p(model, x, y) for x, y in EXAMPLES) / sum(len(y) for _, y in EXAMPLES)


def train(loss, consolidates=False):
    """Losses of some steps of AdamW on all examples at once, clipped to norm 1."""
    model = load()
    parts = [p for key, p in model.named_parameters() if "lora" in key]
    for p in model.parameters():
        p.requires_grad_(False)
    for p in parts:
        p.requires_grad_(True)
    adam = torch.optim.AdamW(parts, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    half = len(CONTROL) // 2
    windows = [CONTROL[i:min(i + WINDOW, half)] for i in range(0, half, WINDOW)]
    anchor, fisher, strength = [p.detach().clone() for p in parts], [torch.zeros_like(p) for p in parts], 8.0
    for window in windows if consolidates else []:
        grads = torch.autograd.grad(log_p(model, window[:1], window[1:]), parts)
        for f, g in zip(fisher, grads):
            f += g ** 2 / sum(len(window) - 1 for window in windows)
    losses = []
    for step in range(STEPS):
        own = total = loss(model)
        if consolidates:
            window = torch.tensor([windows[step % len(windows)][:-1]])
            with torch.no_grad(), model.disable_adapter():
                base = log_softmax(model(window).logits[0], -1)
            apart = kl_div(log_softmax(model(window).logits[0], -1), base, reduction="batchmean", log_target=True)
            penalty = sum((f * (p - a) ** 2).sum() for f, p, a in zip(fisher, parts, anchor))
            total = own + strength * apart + LAMBDA / 2 * penalty
            excess = apart.item() / (0.7 * MAX_DIVERGENCE) - 1
            strength = min(max(strength * np.exp(0.15 * min(max(excess, -1), 1)), 1), 1000)
        adam.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        adam.step()
        losses.append(own.item())
    return np.array(losses)


tensors = [("dpo", train(dpo)), ("kto", train(kto)), ("ewc", train(sft, consolidates=True))]
for name, losses in tensors:
    print(name, losses[[0, 1, 10, -1]])
write(OUT / "preferences.gguf", "training", lambda w: None, tensors)
