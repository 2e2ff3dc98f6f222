#!/usr/bin/env python3
"""Makes the files of tests/data/peft: two tiny models, LoRA adapters of theirs, and the logits that
`peft` computes with them.

    pip install torch transformers peft gguf
    python tests/reference_peft.py [FOLDER]

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
    write(OUT / "logits.gguf", "logits", lambda w: w.add_array("tokens", TOKENS), logits)


main()
