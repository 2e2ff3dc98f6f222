//! Attention, forward and backward.

use crate::arch::attention::{
    AttnParams, AttnPartial, KV_BLOCK, KV_SPAN, KvBlock, KvSpan, MAX_HEAD_DIM,
};
use crate::arch::kv::KvStored;
use crate::arch::level::Arch;
use crate::arch::table::{AttentionFn, Kernels, PanelElement};

impl Arch {
    /// Element type that [`Arch::attention`] of many query rows over half-precision keys
    /// multiplies, and the number of products of that type per product.
    pub fn attention_element(self) -> (PanelElement, u64) {
        self.0.attention_element
    }

    /// Adds the keys of `span` to the partial results of query rows `q`, `(n_q, head_dim)`, that
    /// share its KV head. Row `i` sees the keys at positions `ranges[i].0 .. ranges[i].1`; the span
    /// may have all, some or none of them. Blocks that no row sees are not read.
    ///
    /// # Panics
    /// If the shapes disagree, or the blocks are not those of one span.
    pub fn attention<T: KvElement>(
        self,
        to: &mut AttnPartial<'_>,
        q: &[f32],
        span: KvSpan<'_, T>,
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        check(
            to,
            q,
            span,
            [KV_BLOCK * p.head_dim, KV_BLOCK * p.head_dim_v],
            ranges,
            p,
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { T::attention(self.0)(to, q, span, ranges, p) }
    }

    /// [`Arch::attention`] over keys and values in any precision.
    ///
    /// # Panics
    /// If the shapes disagree, or the blocks are not those of one span.
    pub fn attention_stored(
        self,
        to: &mut AttnPartial<'_>,
        q: &[f32],
        stored: KvStored<'_>,
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let lens = [
            stored.k.block_bytes(p.head_dim),
            stored.v.block_bytes(p.head_dim_v),
        ];
        check(to, q, stored.span, lens, ranges, p);
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.attention_stored)(to, q, stored, ranges, p) }
    }

    /// Merges in the partial results `from`, computed over a later span.
    ///
    /// # Panics
    /// If the shapes disagree.
    pub fn attention_merge(self, to: &mut AttnPartial<'_>, from: &AttnPartial<'_>, p: &AttnParams) {
        to.check(from.sum.len(), p.head_dim_v);
        from.check(from.sum.len(), p.head_dim_v);
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.attention_merge)(to, from, p.head_dim_v) }
    }

    /// Divides the outputs by the sums of the weights, when all keys have been added.
    ///
    /// # Panics
    /// If the shapes disagree.
    pub fn attention_finish(self, to: &mut AttnPartial<'_>, p: &AttnParams) {
        to.check(to.sum.len(), p.head_dim_v);
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.attention_finish)(to, p.head_dim_v) }
    }
}

/// Panics if the shapes disagree; `lens` are those of the keys and the values of a block.
fn check<T>(
    to: &AttnPartial<'_>,
    q: &[f32],
    span: KvSpan<'_, T>,
    lens: [usize; 2],
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    assert!(
        p.head_dim.max(p.head_dim_v) <= MAX_HEAD_DIM,
        "attention: heads at most {MAX_HEAD_DIM} wide"
    );
    assert!(q.len() == ranges.len() * p.head_dim, "attention: queries");
    assert!(
        p.slope == 0.0 || p.exact && p.softcap == 0.0,
        "attention: ALiBi is computed in f32, without a cap"
    );
    to.check(ranges.len(), p.head_dim_v);
    let whole = |b: &KvBlock<'_, T>| [b.k.len(), b.v.len()] == lens;
    assert!(span.blocks.iter().all(whole), "attention: keys and values");
    let inside = span.first.is_multiple_of(KV_BLOCK)
        && span.first % KV_SPAN / KV_BLOCK + span.blocks.len() <= KV_SPAN / KV_BLOCK;
    assert!(
        inside,
        "attention: {} blocks from position {}",
        span.blocks.len(),
        span.first
    );
}

/// Element type of keys and values that kernels read in place.
pub trait KvElement: bytemuck::Pod + Send + Sync + sealed::Attention {}

impl KvElement for f32 {}

impl KvElement for half::f16 {}

#[allow(private_interfaces)] // the trait is sealed: nobody outside can call it
mod sealed {
    use super::{AttentionFn, Kernels};
    #[allow(unreachable_pub, private_interfaces)] // public in a private module: seals the trait
    pub trait Attention: Sized {
        fn attention(k: &Kernels) -> AttentionFn<Self>;
    }
    impl Attention for f32 {
        fn attention(k: &Kernels) -> AttentionFn<f32> {
            k.attention_f32
        }
    }
    impl Attention for half::f16 {
        fn attention(k: &Kernels) -> AttentionFn<half::f16> {
            k.attention_f16
        }
    }
}

/// Operands of the backward pass of [`Arch::attention`], all of one KV head.
#[derive(Clone, Copy, Debug)]
pub struct AttnBackward<'a> {
    /// Queries, `(n_q, head_dim)`.
    pub q: &'a [f32],
    /// Gradient of the output, `(n_q, head_dim_v)`.
    pub dout: &'a [f32],
    /// `Σ dout·out` of each query.
    pub delta: &'a [f32],
    /// Keys, `(n_kv, head_dim)`.
    pub k: &'a [f32],
    /// Values, `(n_kv, head_dim_v)`.
    pub v: &'a [f32],
}

impl AttnBackward<'_> {
    fn check(&self, n_q: usize, n_kv: usize, p: &AttnParams) {
        assert!(
            p.head_dim.max(p.head_dim_v) <= MAX_HEAD_DIM,
            "attention: heads at most {MAX_HEAD_DIM} wide"
        );
        assert!(
            self.q.len() == n_q * p.head_dim && self.dout.len() == n_q * p.head_dim_v,
            "attention: queries"
        );
        assert!(self.delta.len() == n_q, "attention: delta");
        assert!(
            self.k.len() == n_kv * p.head_dim && self.v.len() == n_kv * p.head_dim_v,
            "attention: keys and values"
        );
    }
}

impl Arch {
    /// The gradient of the queries of [`Arch::attention`], `dq: (n_q, head_dim)`, and `lse: (n_q)`,
    /// the log-sum-exp of each query's scores. `ranges` are the keys that each query sees.
    ///
    /// # Panics
    /// If the shapes disagree, or a range is empty or ends after the keys.
    pub fn attention_queries(
        self,
        dq: &mut [f32],
        lse: &mut [f32],
        x: AttnBackward<'_>,
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let n_kv = x.k.len() / p.head_dim;
        x.check(ranges.len(), n_kv, p);
        assert!(
            dq.len() == x.q.len() && lse.len() == ranges.len(),
            "attention_queries"
        );
        assert!(
            ranges.iter().all(|&(a, b)| a < b && b as usize <= n_kv),
            "attention_queries: ranges"
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.attention_queries)(dq, lse, x.q, x.dout, x.delta, x.k, x.v, ranges, p) }
    }

    /// The gradients of the keys and values of [`Arch::attention`], `dk: (n_kv, head_dim)` and
    /// `dv: (n_kv, head_dim_v)`, with `lse` of [`Arch::attention_queries`]. `ranges` are the
    /// queries that see each key.
    ///
    /// # Panics
    /// If the shapes disagree, or a range is empty or ends after the queries.
    pub fn attention_keys(
        self,
        dk: &mut [f32],
        dv: &mut [f32],
        x: AttnBackward<'_>,
        lse: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let n_q = x.q.len() / p.head_dim;
        x.check(n_q, ranges.len(), p);
        assert!(
            dk.len() == x.k.len() && dv.len() == x.v.len() && lse.len() == n_q,
            "attention_keys"
        );
        assert!(
            ranges.iter().all(|&(a, b)| a < b && b as usize <= n_q),
            "attention_keys: ranges"
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.attention_keys)(dk, dv, x.k, x.v, x.q, x.dout, lse, x.delta, ranges, p) }
    }
}
