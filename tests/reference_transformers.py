#!/usr/bin/env python3
"""Makes tests/data/variants.json: tiny models in variants that the reference data lacks, and the logits that Hugging Face's
transformers computes with them.

    pip install torch transformers numpy
    python tests/reference_transformers.py

Weights are hashes of the names that tensors have in GGUF files (`reference_values.py`); all of these families have the rows
of Hugging Face's matrices there in the same order.
"""

import json
import pathlib

import torch
import transformers

from reference_values import values

OUT = pathlib.Path(__file__).parent / "data" / "variants.json"
N_EMBD, N_HEAD, N_KV, HEAD, N_FF, N_VOCAB, N_LAYER = 64, 4, 2, 16, 96, 32, 2
TOKENS = [(i * i * 7 + i * 3 + 1) % N_VOCAB for i in range(24)]
POSITIONS = [0, 2, 6, 10, 14, 18, 21, 23]
BASE = {"vocab_size": N_VOCAB, "hidden_size": N_EMBD, "intermediate_size": N_FF, "num_hidden_layers": N_LAYER, "num_attention_heads": N_HEAD,
        "num_key_value_heads": N_KV, "max_position_embeddings": 128, "layer_norm_eps": 1e-5}
KEYS = {"block_count": N_LAYER, "context_length": 128, "embedding_length": N_EMBD, "feed_forward_length": N_FF, "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_KV, "attention.layer_norm_epsilon": 1e-5}
# Name, architecture, class of transformers, its options, and the keys of the file.
MODELS = [
    ("command-r-plus", "command-r", "Cohere", {"use_qk_norm": True, "logit_scale": 0.5}, {"logit_scale": 0.5}),
    ("stablelm-2-12b", "stablelm", "StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.25},
     {"use_parallel_residual": True, "rope.dimension_count": HEAD // 4}),
    ("stablelm-parallel", "stablelm", "StableLm", {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 1.0},
     {"use_parallel_residual": True, "rope.dimension_count": HEAD}),
]
NAMES = [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"), ("model.layers.", "blk."),
         ("input_layernorm", "attn_norm"), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
         ("self_attn.o_proj", "attn_output"), ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"),
         ("self_attn.q_layernorm", "attn_q_norm"), ("self_attn.k_layernorm", "attn_k_norm"), ("mlp.gate_proj", "ffn_gate"),
         ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")]


def fill(model):
    """Gives the model its weights; the shapes of the tensors in the file, the innermost dimension first."""
    tensors, weights = {}, dict(model.named_parameters())
    for name, weight in weights.items():
        head, _, rest = name.partition(".norms.")
        shape = list(weight.shape)
        if rest:
            # A norm per head is a row of one matrix.
            shape = [sum(other.startswith(head + ".norms.") for other in weights), *shape]
            name = head + ".weight"
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        tensors[name] = shape[::-1]
        x = torch.from_numpy(values(name, shape[::-1]))
        weight.data.copy_(x[int(rest.split(".")[0])] if rest else x)
    return tensors


def main():
    models = {"about": {"tokens": TOKENS, "positions": POSITIONS}}
    for name, arch, cls, options, keys in MODELS:
        config = getattr(transformers, cls + "Config")(**{**BASE, **options})
        model = getattr(transformers, cls + "ForCausalLM")(config).float().eval()
        tensors = fill(model)
        with torch.inference_mode():
            logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0, POSITIONS]
        rows = [[round(x, 5) for x in row] for row in logits.tolist()]
        keys = {f"{arch}.{key}": value for key, value in {**KEYS, **keys, "rope.freq_base": config.rope_parameters["rope_theta"]}.items()}
        models[name] = {"architecture": arch, "metadata": keys, "tensors": tensors, "logits": rows}
    lines = [f"{json.dumps(name)}: {json.dumps(model, separators=(',', ':'))}" for name, model in models.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


main()
