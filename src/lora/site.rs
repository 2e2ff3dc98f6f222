//! Target modules of adapters, by number.

use std::sync::Arc;

/// A matrix that an adapter can change: `W: (n_out, n_in)`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TargetModule {
    /// Name of its tensor in the file; a head that shares the embedding table is called
    /// `output.weight`, too.
    pub tensor: Arc<str>,
    /// Index of the matrix in the tensor, if that holds one per expert.
    pub expert: Option<usize>,
    /// Input width; for the embedding table, whose inputs are tokens, the number of tokens.
    pub n_in: usize,
    /// Output width.
    pub n_out: usize,
}

impl TargetModule {
    /// Index of its layer, if it is in one.
    pub fn layer(&self) -> Option<usize> {
        in_layer(&self.tensor).map(|(layer, _)| layer)
    }

    /// Name without layer and suffix: `attn_q`, `ffn_down_exps`, `output`, `token_embd`, …
    pub fn part(&self) -> &str {
        self.tensor
            .trim_end_matches(".weight")
            .rsplit('.')
            .next()
            .unwrap_or_default()
    }

    /// Whether it is the output head, behind the last norm: keys and values do not depend on it.
    pub(crate) fn is_head(&self) -> bool {
        &*self.tensor == OUTPUT
    }

    /// Whether it is the embedding table, which is looked up instead of multiplied.
    pub fn is_embedding(&self) -> bool {
        &*self.tensor == TOKEN_EMBD
    }
}

/// A model as adapters see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base<'a> {
    /// `general.architecture`.
    pub(crate) arch: &'a str,
    /// Its target modules, by site number.
    pub(crate) sites: &'a Arc<[TargetModule]>,
}

/// Name of the embedding table.
pub(crate) const TOKEN_EMBD: &str = "token_embd.weight";

/// Name of the output head, shared with the embedding table or not.
const OUTPUT: &str = "output.weight";

/// Splits a tensor's name into layer and rest, if it is in a layer.
pub(crate) fn in_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}
