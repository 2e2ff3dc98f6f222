//! Layers of the cache of attention to compressed blocks.

use crate::kv::{KvUse, LayerShape};
use crate::layers::compressed::spec::{BlocksSpec, CompressedSpec};

/// Layers of the cache, in their order.
pub(crate) fn kv_layers(spec: &CompressedSpec) -> impl Iterator<Item = LayerShape> {
    let shape = |window, n_head_kv, n: usize, n_v: usize, use_of| LayerShape {
        window,
        n_head_kv,
        head_dim: n,
        head_dim_v: n_v,
        use_of,
    };
    let d = spec.head_dim;
    // A block, and the one before it.
    let given = move |blocks: BlocksSpec, n: usize| {
        let n_part = blocks.n_part();
        shape(Some(n_part * blocks.ratio), n_part, n, n, KvUse::Index)
    };
    let raw = shape(Some(spec.window), 1, d, d, KvUse::Attention);
    let entries = spec
        .blocks
        .map(|blocks| [given(blocks, d), shape(None, 1, d, d, KvUse::Chosen)]);
    let index = spec.blocks.and_then(|blocks| Some((blocks, blocks.index?)));
    let index = index.map(|(blocks, index)| {
        let n = index.head_dim;
        [given(blocks, n), shape(None, 1, n, 0, KvUse::Index)]
    });
    std::iter::once(raw)
        .chain(entries.into_iter().flatten())
        .chain(index.into_iter().flatten())
}
