#!/usr/bin/env python3
"""Tokens per second of training steps with PyTorch and PEFT, the best of some, for the models of `train::speed`
(tests/it/train.rs): four layers of a 1B shape, or with `small` the shape of the shipped model, in float32, LoRA of rank 8 on
every matrix of the layers, AdamW, 512 tokens per step on two threads.

    pip install torch transformers peft
    python tests/speed_peft.py [small]

On an AMD processor, MKL takes its AVX-512 code only if a library that defines `int mkl_serv_intel_cpu_true(void) { return 1; }`
is preloaded: products are more than twice as fast then (Zen 5).
"""

import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(2)
LARGE = dict(
    vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
)
SMALL = dict(
    vocab_size=3840, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
)
is_small = sys.argv[1:] == ["small"]
config = LlamaConfig(**(SMALL if is_small else LARGE))
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(LlamaForCausalLM(config).float(), LoraConfig(r=8, lora_alpha=8, target_modules=LINEAR))
parameters = [p for p in model.parameters() if p.requires_grad]
adam = torch.optim.AdamW(parameters, lr=2e-3)
for n in [32, 128, 511]:
    times = []
    for _ in range(40 if is_small else 4):
        tokens = torch.randint(0, config.vocab_size, (512 // n, n + 1))
        begun = time.perf_counter()
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        times.append(time.perf_counter() - begun)
    print(f"examples of {n} tokens: {512 // n * n / min(times):.0f} tokens/s")
