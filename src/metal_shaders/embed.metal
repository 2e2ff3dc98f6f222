// Looks up rows of the embedding table.
#include "blocks.h"

struct EmbedArgs {
    uint n_embd;
    uint n_vocab;
    uint n_rows;
    uint row_bytes;
    float scale;
};

// `x[i] = scale * W[tokens[i]]`, one thread per part. A token that does not exist yields zeros.
template <typename F>
kernel void embed(device const uchar* w [[buffer(0)]],
                  device const uint* tokens [[buffer(1)]],
                  device float* x [[buffer(2)]],
                  constant EmbedArgs& p [[buffer(3)]],
                  uint2 group [[threadgroup_position_in_grid]],
                  uint t [[thread_index_in_threadgroup]]) {
    const uint part = group.x * 32 + t;
    if (16 * part >= p.n_embd) return;
    const uint token = tokens[group.y];
    float4x4 weights = float4x4(0.0f);
    if (token < p.n_vocab) weights = F::part(w + ulong(token) * p.row_bytes, part, p.n_embd);
    device float* to = x + ulong(group.y) * p.n_embd + 16 * part;
    for (uint i = 0; i < min(16u, p.n_embd - 16 * part); i++) to[i] = p.scale * weights[i / 4][i % 4];
}

#define EMBED(F) INSTANTIATE("embed_" #F, embed, F)
FOR_FORMATS(EMBED)
