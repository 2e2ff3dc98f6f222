//! The key/value cache of a session.
//!
//! Each layer keeps keys as `(n_head_kv, n_ctx, head_dim)`, values likewise, so that attention of one
//! head streams through adjacent memory. Memory is reserved for the whole context but only touched,
//! and so only taken from the system, as positions are filled.

use crate::arch::{Arch, AttnParams, KvElement};
use crate::error::SessionError;
use crate::team::Crew;
use bytemuck::Zeroable;
use half::f16;

/// Precision of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvType {
    /// 32 bits per value: exact.
    F32,
    /// 16 bits per value: what other engines use unless told otherwise.
    #[default]
    F16,
}

impl KvType {
    /// Bytes of one value.
    pub fn size(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
        }
    }
}

impl std::str::FromStr for KvType {
    type Err = &'static str;
    fn from_str(s: &str) -> Result<KvType, &'static str> {
        match s {
            "f32" => Ok(KvType::F32),
            "f16" => Ok(KvType::F16),
            _ => Err("expected f32 or f16"),
        }
    }
}

/// Sizes of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShape {
    pub(crate) n_layer: usize,
    pub(crate) n_ctx: usize,
    pub(crate) n_head_kv: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
}

impl KvShape {
    /// Bytes of a full cache.
    pub(crate) fn bytes(&self, kind: KvType) -> u64 {
        let row = self.n_head_kv * (self.head_dim + self.head_dim_v) * kind.size();
        ((self.n_layer * row) as u64).saturating_mul(self.n_ctx as u64)
    }
}

/// Keys and values of all layers.
#[derive(Debug)]
pub(crate) enum KvCache {
    F32(Store<f32>),
    F16(Store<f16>),
}

/// The same in one precision.
#[derive(Debug)]
pub(crate) struct Store<T> {
    shape: KvShape,
    layers: Vec<KvLayer<T>>,
}

#[derive(Debug)]
struct KvLayer<T> {
    k: Box<[T]>,
    v: Box<[T]>,
}

impl KvCache {
    /// An empty cache.
    pub(crate) fn new(kind: KvType, shape: KvShape) -> Result<KvCache, SessionError> {
        let error = || SessionError::OutOfMemory { what: "a key/value cache", bytes: shape.bytes(kind) };
        Ok(match kind {
            KvType::F32 => KvCache::F32(Store::new(shape).ok_or_else(error)?),
            KvType::F16 => KvCache::F16(Store::new(shape).ok_or_else(error)?),
        })
    }

    /// A copy of the first `n` positions.
    pub(crate) fn fork(&self, n: usize) -> Result<KvCache, SessionError> {
        match self {
            KvCache::F32(s) => s.fork(n).map(KvCache::F32).ok_or(KvType::F32),
            KvCache::F16(s) => s.fork(n).map(KvCache::F16).ok_or(KvType::F16),
        }
        .map_err(|kind| SessionError::OutOfMemory { what: "a key/value cache", bytes: self.shape().bytes(kind) })
    }

    fn shape(&self) -> KvShape {
        match self {
            KvCache::F32(s) => s.shape,
            KvCache::F16(s) => s.shape,
        }
    }

    /// Writes keys `(m, n_head_kv·head_dim)` and values of positions `pos..pos + m`.
    pub(crate) fn append(&mut self, crew: &Crew<'_>, arch: Arch, layer: usize, pos: usize, k: &[f32], v: &[f32]) {
        match self {
            KvCache::F32(s) => s.append(crew, layer, pos, k, v, |x, y| y.copy_from_slice(x)),
            KvCache::F16(s) => s.append(crew, layer, pos, k, v, |x, y| arch.f32_to_f16(x, y)),
        }
    }

    /// The first keys and values of KV head `head`, as many as `k` and `v` hold.
    pub(crate) fn read(&self, arch: Arch, (layer, head): (usize, usize), k: &mut [f32], v: &mut [f32]) {
        match self {
            KvCache::F32(s) => s.read((layer, head), k, v, |x, y| y.copy_from_slice(x)),
            KvCache::F16(s) => s.read((layer, head), k, v, |x, y| arch.f16_to_f32(x, y)),
        }
    }

    /// Attention of query rows of KV head `head`, see [`Arch::attention`]; ranges are positions.
    pub(crate) fn attention(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        out: &mut [f32],
        q: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        match self {
            KvCache::F32(s) => s.attention(arch, (layer, head), out, q, ranges, p),
            KvCache::F16(s) => s.attention(arch, (layer, head), out, q, ranges, p),
        }
    }
}

impl<T: KvElement + Zeroable> Store<T> {
    fn new(shape: KvShape) -> Option<Store<T>> {
        let zeroed = |dim: usize| {
            let n = shape.n_head_kv.checked_mul(shape.n_ctx)?.checked_mul(dim)?;
            bytemuck::allocation::try_zeroed_slice_box(n).ok()
        };
        let layers =
            (0..shape.n_layer).map(|_| Some(KvLayer { k: zeroed(shape.head_dim)?, v: zeroed(shape.head_dim_v)? }));
        Some(Store { shape, layers: layers.collect::<Option<_>>()? })
    }

    fn fork(&self, n: usize) -> Option<Store<T>> {
        let mut copy = Store::new(self.shape)?;
        for (to, from) in copy.layers.iter_mut().zip(&self.layers) {
            for (to, from, dim) in
                [(&mut to.k, &from.k, self.shape.head_dim), (&mut to.v, &from.v, self.shape.head_dim_v)]
            {
                let heads = to.chunks_exact_mut(self.shape.n_ctx * dim).zip(from.chunks_exact(self.shape.n_ctx * dim));
                heads.for_each(|(to, from)| to[..n * dim].copy_from_slice(&from[..n * dim]));
            }
        }
        Some(copy)
    }

    fn append(
        &mut self,
        crew: &Crew<'_>,
        layer: usize,
        pos: usize,
        k: &[f32],
        v: &[f32],
        convert: impl Fn(&[f32], &mut [T]) + Sync,
    ) {
        let KvShape { n_ctx, n_head_kv, head_dim, head_dim_v, .. } = self.shape;
        let layer = &mut self.layers[layer];
        for (cache, rows, dim) in [(&mut layer.k, k, head_dim), (&mut layer.v, v, head_dim_v)] {
            let head = |h: usize, cache: &mut [T]| {
                for (to, row) in cache[pos * dim..].chunks_exact_mut(dim).zip(rows.chunks_exact(n_head_kv * dim)) {
                    convert(&row[h * dim..][..dim], to);
                }
            };
            // One token is less work than sharing it.
            if rows.len() == n_head_kv * dim {
                cache.chunks_exact_mut(n_ctx * dim).enumerate().for_each(|(h, cache)| head(h, cache));
            } else {
                crew.for_chunks(cache, n_ctx * dim, head);
            }
        }
    }

    fn read(&self, (layer, head): (usize, usize), k: &mut [f32], v: &mut [f32], convert: impl Fn(&[T], &mut [f32])) {
        let KvShape { n_ctx, head_dim, head_dim_v, .. } = self.shape;
        let layer = &self.layers[layer];
        convert(&layer.k[head * n_ctx * head_dim..][..k.len()], k);
        convert(&layer.v[head * n_ctx * head_dim_v..][..v.len()], v);
    }

    fn attention(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        out: &mut [f32],
        q: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let n_ctx = self.shape.n_ctx;
        let n_kv = ranges.iter().map(|r| r.1 as usize).max().unwrap_or(0);
        let k = &self.layers[layer].k[head * n_ctx * p.head_dim..][..n_kv * p.head_dim];
        let v = &self.layers[layer].v[head * n_ctx * p.head_dim_v..][..n_kv * p.head_dim_v];
        arch.attention(out, q, k, v, ranges, p);
    }
}
