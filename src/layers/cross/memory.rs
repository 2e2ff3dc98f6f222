//! The memory of a text that an encoder has read.

/// Keys and values of a text that an encoder has read.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Those of each layer.
    pub(crate) layers: Vec<LayerMemory>,
}

/// Keys and values that a layer reads.
#[derive(Debug)]
pub(crate) struct LayerMemory {
    /// `(tokens, n_head_kv·head_dim)`.
    pub(crate) k: Vec<f32>,
    /// `(tokens, n_head_kv·head_dim_v)`.
    pub(crate) v: Vec<f32>,
}

impl Memory {
    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        let n = |layer: &LayerMemory| (layer.k.len() + layer.v.len()) * size_of::<f32>();
        self.layers.iter().map(n).sum::<usize>() as u64
    }
}
