//! Reading a sequence in attention.

use crate::arch::kv::copy_row;
use crate::arch::{
    Arch, AttnParams, AttnPartial, KV_BLOCK, KV_SPAN, KvBlock, KvElement, KvSpan, KvStored,
    MAX_HEAD_DIM,
};
use crate::kv::KvType;
use crate::kv::sequence::SeqKv;
use crate::quant::DType;
use half::f16;
use std::ops::Range;

impl SeqKv {
    /// Whether a layer's precision depends on age.
    pub(crate) fn is_tiered(&self, layer: usize) -> bool {
        self.layout.groups[self.layout.layers[layer].group].is_tiered()
    }

    /// Applies to a query head the transformation of the layer's stored keys.
    pub(crate) fn transform_query(&self, arch: Arch, layer: usize, query: &mut [f32]) {
        if self.layout.groups[self.layout.layers[layer].group].transformed[0] {
            arch.hadamard(query);
        }
    }

    /// Outputs of heads when all keys have been added: as [`Arch::attention_finish`], and without the
    /// transformation of the layer's stored values.
    pub(crate) fn finish_attention(
        &self,
        arch: Arch,
        layer: usize,
        total: &mut AttnPartial<'_>,
        params: &AttnParams,
    ) {
        arch.attention_finish(total, params);
        if self.layout.groups[self.layout.layers[layer].group].transformed[1] {
            // The matrix is its own inverse.
            let heads = total.out.chunks_exact_mut(params.head_dim_v);
            heads.for_each(|out| arch.hadamard(out));
        }
    }

    /// Reads a page of an index: its keys (`part` 0) or values (1), `(KV_BLOCK, dim)`.
    pub(crate) fn index_part(
        &self,
        arch: Arch,
        layer: usize,
        page: usize,
        part: usize,
        to: &mut [f32],
    ) {
        let at = self.layout.layers[layer];
        let group = &self.layout.groups[at.group];
        let form = &group.forms[0];
        let page = self.tables[group.table][page].as_ref();
        let bytes = page.expect("an index has no window").values::<u8>();
        let [k, v] = at.head(0, form, 0);
        let bytes = &bytes[if part == 0 { k } else { v }];
        let dtype = match form.types[part] {
            KvType::F32 => DType::F32,
            _ => DType::F16,
        };
        arch.dequantize(dtype, bytes, to);
    }

    /// Reads what an index has at one position: a key (`part` 0) or value (1) of head `head`.
    pub(crate) fn index_row(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        position: usize,
        part: usize,
        to: &mut [f32],
    ) {
        let at = self.layout.layers[layer];
        let group = &self.layout.groups[at.group];
        let form = &group.forms[0];
        let page = self.tables[group.table][position / KV_BLOCK].as_ref();
        let [k, v] = at.head(0, form, head);
        let (bytes, dtype) = match form.types[part] {
            KvType::F32 => (4, DType::F32),
            _ => (2, DType::F16),
        };
        let bytes = bytes * to.len();
        let first = if part == 0 { k } else { v }.start + position % KV_BLOCK * bytes;
        let page = page.expect("what is seen is held").values::<u8>();
        arch.dequantize(dtype, &page[first..first + bytes], to);
    }

    /// Pages of the positions `range`, in the pieces that [`SeqKv::attention`] takes: each of one
    /// span of keys and one precision tier. The last position of `range` is a query's own; if
    /// precision depends on age, queries in other pages have other pieces.
    pub(crate) fn pieces(
        &self,
        layer: usize,
        range: (u32, u32),
    ) -> impl Iterator<Item = Range<usize>> {
        let group = &self.layout.groups[self.layout.layers[layer].group];
        let (mut start, end) = (
            range.0 as usize / KV_BLOCK,
            (range.1 as usize).div_ceil(KV_BLOCK),
        );
        let query = end.saturating_sub(1);
        std::iter::from_fn(move || {
            let first = start;
            let form = group.form_of(query, first);
            let span = (first + 1).next_multiple_of(KV_SPAN / KV_BLOCK).min(end);
            while start < span && (start == first || group.form_of(query, start) == form) {
                start += 1;
            }
            (first < end).then_some(first..start)
        })
    }

    /// Adds the keys of a [piece](SeqKv::pieces) to the partial results of query rows of KV head
    /// `head`, see [`Arch::attention`]; ranges are positions.
    pub(crate) fn attention(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        piece: Range<usize>,
        to: &mut AttnPartial<'_>,
        q: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let centre = self.layout.centre(layer, head, piece.start * KV_BLOCK);
        raised(to, (q, centre), p, |to| {
            self.attention_alone(arch, (layer, head), piece, to, q, ranges, p);
        });
    }

    /// Adds a partial result of [`SeqKv::attention_alone`] to the earlier ones of the same rows.
    pub(crate) fn merge_attention(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        piece: Range<usize>,
        to: &mut AttnPartial<'_>,
        partial: &AttnPartial<'_>,
        q: &[f32],
        p: &AttnParams,
    ) {
        let centre = self.layout.centre(layer, head, piece.start * KV_BLOCK);
        raised(to, (q, centre), p, |to| {
            arch.attention_merge(to, partial, p)
        });
    }

    /// [`SeqKv::attention`] over the keys as they are stored: of scores, what all keys of the piece have
    /// in common is missing.
    pub(crate) fn attention_alone(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        piece: Range<usize>,
        to: &mut AttnPartial<'_>,
        q: &[f32],
        ranges: &[(u32, u32)],
        p: &AttnParams,
    ) {
        let at = self.layout.layers[layer];
        let group = &self.layout.groups[at.group];
        let last = ranges.iter().map(|r| r.1 as usize).max().unwrap_or(1) - 1;
        let i = group.form_of(last / KV_BLOCK, piece.start);
        let (form, first) = (&group.forms[i], piece.start * KV_BLOCK);
        let pages = &self.tables[group.table + i][piece];
        let mut bytes = [KvBlock::<u8>::EMPTY; KV_SPAN / KV_BLOCK];
        for (to, page) in bytes.iter_mut().zip(pages) {
            let page = page.as_ref().expect("what is seen is held").values::<u8>();
            let [k, v] = at.head(i, form, head);
            *to = KvBlock {
                k: &page[k],
                v: &page[v],
            };
        }
        let span = KvSpan {
            first,
            blocks: &bytes[..pages.len()],
        };
        attend(arch, form.types, span, to, q, ranges, p);
    }

    /// Adds the keys at `positions`, which ascend, to the partial results of at most [`KV_BLOCK`] query
    /// rows of KV head `head`, in a layer whose positions are [chosen](crate::kv::layout::KvUse). Rows
    /// that lie apart are copied into blocks, so that a kernel takes [`KV_BLOCK`] of them at once; but
    /// for ALiBi, a key's place is nothing to its score.
    pub(crate) fn attention_at(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        mut positions: impl Iterator<Item = u32>,
        to: &mut AttnPartial<'_>,
        q: &[f32],
        p: &AttnParams,
    ) {
        assert!(p.slope == 0.0, "chosen positions with ALiBi");
        let at = self.layout.layers[layer];
        let group = &self.layout.groups[at.group];
        let form = &group.forms[0];
        let dims = at.dims();
        let mut room = [0, 1].map(|_| BlockRoom([0; _]));
        loop {
            let mut n = 0;
            for position in positions.by_ref().take(KV_BLOCK) {
                let (page, row) = (position as usize / KV_BLOCK, position as usize % KV_BLOCK);
                let page = self.tables[group.table][page].as_ref();
                let page = page.expect("what is seen is held").values::<u8>();
                for (part, from) in at.head(0, form, head).into_iter().enumerate() {
                    let (kind, to) = (form.types[part], &mut room[part].0);
                    copy_row(kind, dims[part], (&page[from], row), (to, n));
                }
                n += 1;
            }
            if n == 0 {
                return;
            }
            let [k, v] = [0, 1].map(|part| {
                let bytes = form.types[part].block_bytes(dims[part]);
                &room[part].0[..bytes]
            });
            let span = KvSpan {
                first: 0,
                blocks: &[KvBlock { k, v }],
            };
            let ranges = &[(0, n as u32); KV_BLOCK][..to.sum.len()];
            attend(arch, form.types, span, to, q, ranges, p);
        }
    }
}

/// Adds keys that are stored without `centre`: what `add` adds to the partial results has scores that lack
/// the product of query and centre, so that of earlier keys it is taken away meanwhile.
fn raised(
    to: &mut AttnPartial<'_>,
    (q, centre): (&[f32], Option<&[f32]>),
    p: &AttnParams,
    add: impl FnOnce(&mut AttnPartial<'_>),
) {
    let Some(centre) = centre else {
        return add(to);
    };
    let score = |q: &[f32]| {
        let mut sums = [0.0; LANES];
        let (whole, rest) = q.as_chunks::<LANES>();
        let (of_centre, rest_of_centre) = centre.as_chunks::<LANES>();
        for (q, c) in whole.iter().zip(of_centre) {
            for i in 0..LANES {
                sums[i] += q[i] * c[i];
            }
        }
        let rest = sums.iter_mut().zip(rest).zip(rest_of_centre);
        rest.for_each(|((sum, q), c)| *sum += q * c);
        p.scale * sums.iter().sum::<f32>()
    };
    let rows = q.chunks_exact(p.head_dim);
    to.max
        .iter_mut()
        .zip(rows.clone())
        .for_each(|(max, q)| *max -= score(q));
    add(to);
    to.max
        .iter_mut()
        .zip(rows)
        .for_each(|(max, q)| *max += score(q));
}

/// Sums side by side in a product of vectors.
const LANES: usize = 16;

/// Room for a block of any precision, aligned as pages are.
#[repr(align(64))]
struct BlockRoom([u8; KV_BLOCK * MAX_HEAD_DIM * size_of::<f32>()]);

/// [`Arch::attention`] over blocks of these precisions of keys and values.
fn attend(
    arch: Arch,
    types: [KvType; 2],
    span: KvSpan<'_, u8>,
    to: &mut AttnPartial<'_>,
    q: &[f32],
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    match types {
        [KvType::F32, KvType::F32] => {
            with_values(span, |span| arch.attention::<f32>(to, q, span, ranges, p))
        }
        [KvType::F16, KvType::F16] => {
            with_values(span, |span| arch.attention::<f16>(to, q, span, ranges, p))
        }
        [k, v] => arch.attention_stored(to, q, KvStored { k, v, span }, ranges, p),
    }
}

/// A span of blocks of values of one type.
fn with_values<T: KvElement>(span: KvSpan<'_, u8>, f: impl FnOnce(KvSpan<'_, T>)) {
    let mut blocks = [KvBlock::EMPTY; KV_SPAN / KV_BLOCK];
    for (to, from) in blocks.iter_mut().zip(span.blocks) {
        *to = KvBlock {
            k: bytemuck::cast_slice(from.k),
            v: bytemuck::cast_slice(from.v),
        };
    }
    f(KvSpan {
        first: span.first,
        blocks: &blocks[..span.blocks.len()],
    });
}
