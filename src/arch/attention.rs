//! Softmax attention of query rows that share one KV head, over keys and values in blocks of 64
//! positions.
//!
//! Keys are taken span by span. Each span gives a row a partial result: the weighted sum of values,
//! the largest score, and the sum of the weights relative to it. Partial results are merged in
//! ascending order of spans, and divided by the sum at the end. Spans begin at absolute positions,
//! so a row's bits are the same whether one task takes all spans, as in prompts, or many tasks take
//! one each, as in decoding.

/// Positions of a block of keys and values.
pub const KV_BLOCK: usize = 64;

/// Positions of a span: long enough that rounding the queries anew for each span costs little
/// (`avx512/attention_i16.rs`; with 512, attention of long prompts takes a tenth longer, with 1024
/// 3 %), short enough that one token after a few thousand others makes many tasks.
pub const KV_SPAN: usize = 1024;

/// Widest attention head the kernels take; wider models are refused when opened.
pub const MAX_HEAD_DIM: usize = 576;

/// Parameters of a softmax-attention call.
#[derive(Clone, Copy, Debug)]
pub struct AttnParams {
    /// Width of a key (and query) row.
    pub head_dim: usize,
    /// Width of a value row.
    pub head_dim_v: usize,
    /// Factor on `q·k`.
    pub scale: f32,
    /// `c·tanh(s/c)` on the scaled scores; 0 means none.
    pub softcap: f32,
    /// ALiBi slope (arXiv 2108.12409): subtracted from a score once per position that the key lies
    /// before the last one the row sees; 0 means none.
    pub slope: f32,
    /// Whether every row is computed in `f32`, as decode rows are. If not, a level may round the
    /// keys and values of blocks that end before a row's own position (`attention_i16.rs`).
    pub exact: bool,
}

/// Keys and values of one KV head at [`KV_BLOCK`] positions.
#[derive(Clone, Copy, Debug)]
pub struct KvBlock<'a, T> {
    /// `(KV_BLOCK, head_dim)`.
    pub k: &'a [T],
    /// `(KV_BLOCK, head_dim_v)`.
    pub v: &'a [T],
}

impl<T> KvBlock<'_, T> {
    /// An empty block, to initialise tables.
    pub const EMPTY: Self = KvBlock { k: &[], v: &[] };
}

/// Blocks of one KV head at adjacent positions, all inside one span.
#[derive(Clone, Copy, Debug)]
pub struct KvSpan<'a, T> {
    /// Position of the first key, a multiple of [`KV_BLOCK`].
    pub first: usize,
    /// At most `KV_SPAN / KV_BLOCK`.
    pub blocks: &'a [KvBlock<'a, T>],
}

#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
impl<T> KvSpan<'_, T> {
    /// Position after the last key.
    #[inline]
    fn end(&self) -> usize {
        self.first + self.blocks.len() * KV_BLOCK
    }

    /// The blocks between the first and the last key that any of the rows sees.
    pub(super) fn seen(&self, ranges: &[(u32, u32)]) -> std::ops::Range<usize> {
        let start = ranges
            .iter()
            .map(|r| r.0 as usize)
            .min()
            .unwrap_or(0)
            .clamp(self.first, self.end());
        let end = ranges
            .iter()
            .map(|r| r.1 as usize)
            .max()
            .unwrap_or(0)
            .clamp(start, self.end());
        (start - self.first) / KV_BLOCK..(end - self.first).div_ceil(KV_BLOCK)
    }
}

/// Partial result of attention of `n_q` query rows, over the keys added so far.
#[derive(Debug)]
pub struct AttnPartial<'a> {
    /// Weighted sums of values, `(n_q, head_dim_v)`.
    pub out: &'a mut [f32],
    /// Largest score of each row.
    pub max: &'a mut [f32],
    /// Sum of each row's weights, `exp(score − max)`; 0 where no key was added.
    pub sum: &'a mut [f32],
}

impl<'a> AttnPartial<'a> {
    /// Buffer length for `n_q` rows, in `f32` values.
    pub fn len(n_q: usize, head_dim_v: usize) -> usize {
        n_q * (head_dim_v + 2)
    }

    /// View of a buffer of [`AttnPartial::len`] values as `n_q` rows; the values stay as they are.
    ///
    /// # Panics
    /// If the buffer is shorter than `2·n_q`.
    pub fn of(buffer: &'a mut [f32], n_q: usize) -> AttnPartial<'a> {
        let (out, rest) = buffer.split_at_mut(buffer.len() - 2 * n_q);
        let (max, sum) = rest.split_at_mut(n_q);
        AttnPartial { out, max, sum }
    }

    /// Resets all rows to "no key added".
    pub fn clear(&mut self) {
        self.out.fill(0.0);
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }

    /// View of at most `n` rows from row `first` on; rows are `head_dim_v` wide.
    #[cfg(any(
        target_arch = "x86_64",
        target_arch = "aarch64",
        target_feature = "simd128"
    ))]
    #[inline]
    pub(super) fn rows(&mut self, first: usize, n: usize, head_dim_v: usize) -> AttnPartial<'_> {
        let end = self.sum.len().min(first + n);
        AttnPartial {
            out: &mut self.out[first * head_dim_v..end * head_dim_v],
            max: &mut self.max[first..end],
            sum: &mut self.sum[first..end],
        }
    }

    pub(super) fn check(&self, n_q: usize, head_dim_v: usize) {
        let right =
            self.out.len() == n_q * head_dim_v && self.max.len() == n_q && self.sum.len() == n_q;
        assert!(right, "attention: partial results");
    }
}
