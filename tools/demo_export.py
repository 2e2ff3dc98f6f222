#!/usr/bin/env python3
"""Write the trained demo model as GGUF: matrices Q8_0, norms F32.

    python3 tools/demo_export.py WORKDIR models/ruvllm-rust-6m-q8_0.gguf    # torch, gguf
"""
import json
import sys
from pathlib import Path

import gguf
import torch


def main():
    work, out = Path(sys.argv[1]), sys.argv[2]
    saved = torch.load(work / "model.pt", weights_only=False)
    c, weights = saved["config"], saved["model"]
    bpe = json.loads((work / "tokenizer.json").read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)

    w = gguf.GGUFWriter(out, "llama")
    w.add_name("ruvllm rust 6M")
    w.add_description("A small model of English about Rust, trained on the documentation of the Rust toolchain.")
    w.add_license("MIT OR Apache-2.0")
    w.add_languages(["en"])
    w.add_size_label("6M")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_vocab_size(c["vocab"])
    w.add_context_length(c["ctx"])
    w.add_embedding_length(c["dim"])
    w.add_block_count(c["layers"])
    w.add_feed_forward_length(c["ff"])
    w.add_head_count(c["heads"])
    w.add_head_count_kv(c["kv_heads"])
    w.add_layer_norm_rms_eps(c["eps"])
    w.add_rope_dimension_count(c["head_dim"])
    w.add_rope_freq_base(c["theta"])

    # What the card recommends; programs that know the keys use it unless told otherwise.
    w.add_float32("general.sampling.temp", 0.7)
    w.add_float32("general.sampling.top_p", 0.9)
    w.add_float32("general.sampling.penalty_repeat", 1.05)

    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    w.add_token_merges([" ".join(m) for m in bpe["merges"]])
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)
    w.add_add_bos_token(True)

    for name, t in weights.items():
        name = name if name.endswith(".weight") else name + ".weight"
        data = t.float().numpy()
        if data.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(name, gguf.quants.quantize(data, q8), raw_dtype=q8)
        else:
            w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(out, Path(out).stat().st_size, "bytes, step", saved["step"])


if __name__ == "__main__":
    main()
