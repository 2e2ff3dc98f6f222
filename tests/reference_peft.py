#!/usr/bin/env python3
"""Makes the files of tests/data/peft: two tiny models, LoRA adapters of theirs, and the logits that
`peft` computes with them.

    pip install torch transformers peft gguf
    python tests/reference_peft.py [FOLDER]

`training.gguf` has the losses of 100 steps of training, `merging.gguf` matrices that peft's
`add_weighted_adapter` makes of the Llama's adapter and of a second one, `llama-second.gguf`.

With FOLDER the adapters are saved there too, as peft does, for llama.cpp's `convert_lora_to_gguf.py`:
its tensors are the same as those written here.

The models are random. A Llama (queries and keys rotated in adjacent pairs, so its rows are permuted on
the way to GGUF, and so is `lora_b`) with an adapter on every linear module; a Qwen 2 whose head shares
the embedding table, with adapters on both of its sides. Everything is F32.
"""

import pathlib
import sys

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

OUT = pathlib.Path(__file__).parent / "data" / "peft"
TOKENS = [1, 17, 4, 42, 9, 9, 33, 0, 28, 5, 49, 12]
SIZES = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def name_of(module):
    """`blk.0.attn_q` for `model.layers.0.self_attn.q_proj`."""
    if module.startswith("model.layers."):
        _, _, i, rest = module.split(".", 3)
        return f"blk.{i}.{LAYER[rest]}"
    return TOP[module]


def permute(w, n_head):
    """Rows of a head from halves (x, x + n/2) to adjacent pairs."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def rows(name, w, config):
    """Output rows as the GGUF file of this architecture orders them."""
    if config.model_type == "llama" and "attn_q" in name:
        return permute(w, config.num_attention_heads)
    if config.model_type == "llama" and "attn_k" in name:
        return permute(w, config.num_key_value_heads)
    return w


def write(path, arch, metadata, tensors):
    writer = gguf.GGUFWriter(path, arch)
    metadata(writer)
    for name, data in tensors:
        writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(model, path):
    config = model.config

    def metadata(w):
        w.add_context_length(config.max_position_embeddings)
        w.add_embedding_length(config.hidden_size)
        w.add_block_count(config.num_hidden_layers)
        w.add_feed_forward_length(config.intermediate_size)
        w.add_head_count(config.num_attention_heads)
        w.add_head_count_kv(config.num_key_value_heads)
        w.add_rope_freq_base(config.rope_parameters["rope_theta"])
        w.add_layer_norm_rms_eps(config.rms_norm_eps)

    tensors = []
    for key, value in model.state_dict().items():
        module, kind = key.rsplit(".", 1)
        name = name_of(module)
        if name != "output" or not config.tie_word_embeddings:
            tensors.append((f"{name}.{kind}", rows(name, value.numpy(), config)))
    write(path, config.model_type, metadata, tensors)


def write_adapter(model, config, path):
    def metadata(w):
        w.add_type(gguf.GGUFType.ADAPTER)
        w.add_string(gguf.Keys.Adapter.TYPE, "lora")
        w.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(model.peft_config["default"].lora_alpha))

    tensors = []
    for module, part in model.named_modules():
        if not hasattr(part, "lora_A") or not hasattr(part, "base_layer"):
            continue
        name = name_of(module.removeprefix("base_model.model."))
        if "default" in part.lora_embedding_A:
            # llama.cpp looks rows of `lora_a` up, so it is turned.
            a, b = part.lora_embedding_A["default"].T, part.lora_embedding_B["default"]
        else:
            a, b = part.lora_A["default"].weight, part.lora_B["default"].weight
        tensors.append((f"{name}.weight.lora_a", a.detach().numpy()))
        tensors.append((f"{name}.weight.lora_b", rows(name, b.detach().numpy(), config)))
    write(path, config.model_type, metadata, tensors)


def randomise(model):
    """Weights whose products keep the size of their input; norms around 1."""
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.uniform_(0.75, 1.25)
            elif p.dim() == 2:
                bound = 1.5 / p.shape[1] ** 0.5
                p.uniform_(-bound, bound)
            else:
                p.uniform_(-0.5, 0.5)


# Prompts and completions; only the latter are learnt.
EXAMPLES = [([1, 17, 4], [42, 9, 9]), ([1, 33, 0, 28], [5]), ([1, 12, 7, 7], [8, 30, 2]), ([1, 44], [3, 6, 19, 21])]


def train(model):
    """Losses of 100 steps of AdamW on all examples at once, clipped to norm 1."""
    parts = [p for key, p in model.named_parameters() if "lora" in key]
    for p in model.parameters():
        p.requires_grad_(False)
    for p in parts:
        p.requires_grad_(True)
    adam = torch.optim.AdamW(parts, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    losses = []
    for _ in range(100):
        nll, n = 0.0, 0
        for prompt, completion in EXAMPLES:
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1]
            nll = nll + torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum")
            n += len(completion)
        loss = nll / n
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        adam.step()
        losses.append(loss.item())
    return np.array(losses)


def merge(model, path):
    """Changes of a matrix by both adapters, merged: `ties_svd` and `svd` with peft, of rank 4."""
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=3, target_modules=["down_proj"], init_lora_weights=False))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "second" in key:
                p.uniform_(-0.25, 0.25)
    second = [
        (f"{name_of(name.removeprefix('base_model.model.'))}.weight.lora_{'a' if 'A' in key else 'b'}", weight)
        for name, part in model.named_modules() if hasattr(part, "lora_A") and "second" in part.lora_A
        for key, weight in [("A", part.lora_A["second"].weight), ("B", part.lora_B["second"].weight)]
    ]

    def metadata(w):
        w.add_type(gguf.GGUFType.ADAPTER)
        w.add_string(gguf.Keys.Adapter.TYPE, "lora")
        w.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 3.0)

    write(path, model.config.model_type, metadata, [(name, w.detach().numpy()) for name, w in second])
    merged = []
    # Trimming by peft is by the same quantile; its weights are powers of two, so that they round nothing.
    for kind in ["svd", "ties_svd"]:
        model.add_weighted_adapter(
            ["default", "second"], [1.0, 0.5], kind, combination_type=kind, svd_rank=4, density=0.5, majority_sign_method="total"
        )
        for name, part in model.named_modules():
            if hasattr(part, "lora_A") and kind in part.lora_A and "down_proj" in name:
                name = name_of(name.removeprefix("base_model.model."))
                merged.append((f"{kind}.{name}", part.get_delta_weight(kind).detach().numpy()))
    return merged


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    cases = [
        (LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)), LINEAR + ["lm_head"], 3, 5),
        (Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)), LINEAR + ["lm_head", "embed_tokens"], 2, 3),
    ]
    tokens = torch.tensor([TOKENS])
    logits = []
    for model, targets, rank, alpha in cases:
        model = model.float().eval()
        config, arch = model.config, model.config.model_type
        randomise(model)
        write_model(model, OUT / f"{arch}.gguf")
        base = model(tokens).logits[0].detach().numpy()
        lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
        model = get_peft_model(model, lora).eval()
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "lora" in key:
                    p.uniform_(-0.25, 0.25)
        write_adapter(model, config, OUT / f"{arch}-adapter.gguf")
        adapted = model(tokens).logits[0].detach().numpy()
        logits += [(f"{arch}.base", base), (f"{arch}.adapted", adapted)]
        if len(sys.argv) > 1:
            config.architectures = [type(model.base_model.model).__name__]
            config.save_pretrained(f"{sys.argv[1]}/{arch}-base")
            model.save_pretrained(f"{sys.argv[1]}/{arch}")
        print(arch, "the adapter moves logits by up to", abs(adapted - base).max())
        if arch == "llama":
            with torch.random.fork_rng():
                merged = merge(model, OUT / "llama-second.gguf")
            write(OUT / "merging.gguf", "merging", lambda w: None, merged)
            model.set_adapter("default")
            write(OUT / "training.gguf", "training", lambda w: None, [("losses", train(model))])
    write(OUT / "logits.gguf", "logits", lambda w: w.add_array("tokens", TOKENS), logits)


if __name__ == "__main__":
    main()
