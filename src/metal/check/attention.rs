//! Attention over page tables, and appending to them.

use super::{Checker, Data, EPS, FAST, Handle, Lcg, close, same};
use crate::arch::{Arch, AttnParams, AttnPartial, KV_BLOCK, KV_SPAN, KvBlock, KvSpan};
use crate::metal::kernels::*;
use crate::quant::DType;
use half::f16;

/// Shape of a layer's attention.
#[derive(Clone, Copy, Debug)]
struct Shape {
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    head_dim_v: usize,
    window: usize,
    softcap: f32,
    sinks: bool,
}

/// A layer without window, cap and sinks, whose values are as wide as its keys.
const fn plain(n_head: usize, n_head_kv: usize, head_dim: usize) -> Shape {
    Shape { n_head, n_head_kv, head_dim, head_dim_v: head_dim, window: 0, softcap: 0.0, sinks: false }
}

const POSITIONS: usize = PAGE_POSITIONS as usize;
/// Number of values in a page before the layer's keys and values, as if of another layer.
const BEFORE: usize = 24;

/// A sequence: keys and values of its positions, `(n_head_kv, len, head_dim)`.
struct Sequence {
    keys: Vec<f16>,
    values: Vec<f16>,
    len: usize,
}

/// Sequences in pages on the GPU.
struct Cache {
    sequences: Vec<Sequence>,
    pages: Vec<Handle>,
    table: Handle,
    n_pages: usize,
    /// Index of each sequence's first entry in the table.
    first: Vec<usize>,
}

fn key_offset() -> usize {
    BEFORE
}

fn value_offset(s: &Shape) -> usize {
    BEFORE + s.n_head_kv * POSITIONS * s.head_dim
}

impl Cache {
    /// Makes sequences of these lengths; the pages before position `seen` of a sequence are missing. Pages are
    /// shuffled, and filled only up to the last position.
    fn new(gpu: &mut Checker<'_>, lcg: &mut Lcg, s: &Shape, lens: &[usize], seen: &[usize]) -> Cache {
        let random = |lcg: &mut Lcg, n: usize| (0..n).map(|_| f16::from_f32(lcg.signed())).collect::<Vec<_>>();
        let n_pages = lens.iter().map(|len| len.div_ceil(POSITIONS)).sum();
        let table = gpu.stage.empty(n_pages as u64 * 8, 8);
        let mut cache = Cache { sequences: vec![], pages: vec![], table, n_pages, first: vec![] };
        let mut next = 0;
        let page_len = value_offset(s) + s.n_head_kv * POSITIONS * s.head_dim_v;
        for (&len, &seen) in lens.iter().zip(seen) {
            cache.first.push(next);
            let keys = random(lcg, s.n_head_kv * len * s.head_dim);
            let values = random(lcg, s.n_head_kv * len * s.head_dim_v);
            for page in 0..len.div_ceil(POSITIONS) {
                if (page + 1) * POSITIONS > seen {
                    let id = gpu.stage.empty(page_len as u64 * 2, 2);
                    let filled = POSITIONS.min(len - page * POSITIONS);
                    for head in 0..s.n_head_kv {
                        for (of, offset, width) in
                            [(&keys, key_offset(), s.head_dim), (&values, value_offset(s), s.head_dim_v)]
                        {
                            let from = &of[(head * len + page * POSITIONS) * width..][..filled * width];
                            let to = offset + head * POSITIONS * width;
                            gpu.stage.fill(id, 2 * to as u64, bytemuck::cast_slice(from));
                        }
                    }
                    gpu.stage.point(table, 8 * next as u64, id);
                    cache.pages.push(id);
                }
                next += 1;
            }
            cache.sequences.push(Sequence { keys, values, len });
        }
        cache
    }

    /// Attention of one row by the scalar level, and its tolerance.
    fn expected(&self, s: &Shape, q: &[f32], sequence: usize, pos: usize, sinks: &[f32]) -> (Vec<f32>, f32) {
        let Sequence { keys, values, len } = &self.sequences[sequence];
        let start = if s.window == 0 { 0 } else { (pos + 1).saturating_sub(s.window) };
        let (mut out, mut tolerance) = (Vec::new(), 0.0f32);
        for head in 0..s.n_head {
            let kv = head / (s.n_head / s.n_head_kv);
            let q = &q[head * s.head_dim..][..s.head_dim];
            let k = &keys[kv * len * s.head_dim..][..len * s.head_dim];
            let v = &values[kv * len * s.head_dim_v..][..len * s.head_dim_v];
            let p = AttnParams {
                head_dim: s.head_dim,
                head_dim_v: s.head_dim_v,
                scale: scale(s),
                softcap: s.softcap,
                slope: 0.0,
                exact: false,
            };
            let mut y = vec![0.0; s.head_dim_v];
            attend(&mut y, q, k, v, (start as u32, pos as u32 + 1), &p);
            // A sink takes a part of the weights: the output is `y · Σe / (Σe + e^sink)`.
            let score = |j: usize| {
                let product: f32 = (0..s.head_dim).map(|i| q[i] * k[j * s.head_dim + i].to_f32()).sum();
                let score = product * p.scale;
                if s.softcap > 0.0 { s.softcap * (score / s.softcap).tanh() } else { score }
            };
            let sum: f64 = (start..=pos).map(|j| f64::from(score(j)).exp()).sum();
            let share = sum / (sum + f64::from(sinks[head]).exp());
            out.extend(y.iter().map(|y| (f64::from(*y) * share) as f32));
            // Errors of scores become relative errors of weights, in numerator and denominator; then come the sums over
            // the keys.
            let magnitude: f32 = q.iter().map(|q| q.abs()).sum::<f32>() * p.scale;
            let of_score = s.head_dim as f32 * EPS * magnitude;
            tolerance = tolerance.max(4.0 * of_score + 2.0 * (pos + 1 - start) as f32 * EPS + 2.0 * FAST);
        }
        (out, tolerance)
    }
}

fn scale(s: &Shape) -> f32 {
    1.0 / (s.head_dim as f32).sqrt()
}

/// Variant number of the kernel for a shape.
fn variant(s: &Shape) -> u32 {
    let widest = s.head_dim.max(s.head_dim_v) as u32;
    *HEAD_DIMS.iter().find(|&&d| widest <= d).unwrap()
}

fn sinks(lcg: &mut Lcg, s: &Shape) -> Vec<f32> {
    (0..s.n_head).map(|_| if s.sinks { 3.0 * lcg.signed() } else { -1e30 }).collect()
}

fn args(s: &Shape, cache: &Cache, n_rows: usize) -> AttentionArgs {
    AttentionArgs {
        n_rows: n_rows as u32,
        n_head: s.n_head as u32,
        n_head_kv: s.n_head_kv as u32,
        head_dim: s.head_dim as u32,
        head_dim_v: s.head_dim_v as u32,
        key_offset: key_offset() as u32,
        value_offset: value_offset(s) as u32,
        window: s.window as u32,
        n_pages: cache.n_pages as u32,
        scale: scale(s),
        softcap: s.softcap,
        ..AttentionArgs::default()
    }
}

/// Number of splits that a row at `pos` sees.
fn n_splits(s: &Shape, pos: usize) -> usize {
    let start = if s.window == 0 { 0 } else { (pos + 1).saturating_sub(s.window) };
    pos / SPLIT as usize - start / SPLIT as usize + 1
}

pub(super) fn decode(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(7);
    let cases = [
        (plain(2, 1, 64), &[1, 65][..]),
        (Shape { softcap: 0.7, ..plain(3, 3, 80) }, &[64, 9]),
        (Shape { sinks: true, ..plain(9, 1, 96) }, &[70]),
        (Shape { window: 30, ..plain(4, 2, 112) }, &[600, 29, 131]),
        (Shape { window: 100, sinks: true, ..plain(8, 1, 128) }, &[560]),
        (plain(2, 1, 128), &[1100, 5]),
        (Shape { head_dim_v: 128, ..plain(5, 1, 192) }, &[66]),
        (plain(5, 1, 256), &[41]),
        (plain(3, 1, 512), &[33]),
    ];
    for (s, lens) in cases {
        let mut seen: Vec<usize> = Vec::new();
        for len in lens {
            seen.push(if s.window == 0 { 0 } else { len - s.window.min(*len) });
        }
        let cache = Cache::new(gpu, &mut lcg, &s, lens, &seen);
        let (q, sinks) = (lcg.values(lens.len() * s.n_head * s.head_dim), sinks(&mut lcg, &s));
        let rows: Vec<u32> =
            lens.iter().zip(&cache.first).flat_map(|(len, first)| [*len as u32 - 1, *first as u32]).collect();
        let most = lens.iter().map(|len| n_splits(&s, len - 1)).max().unwrap();
        let args = AttentionArgs { n_splits: most as u32, ..args(&s, &cache, lens.len()) };

        // Splits that a row lacks stay unwritten, so both kernels share the buffer.
        let partial = gpu.stage.empty((ATTENTION_DECODE.buffers[3].len)(&args) * 4, 4);
        let data = [Data::F32(&q), Data::U32(&rows), Data::Made(cache.table), Data::Made(partial)];
        gpu.call(&ATTENTION_DECODE, DType::F32, variant(&s), &args, &data, &cache.pages)?;
        let data = [Data::Made(partial), Data::U32(&rows), Data::F32(&sinks), Data::Out];
        let out = gpu.call(&ATTENTION_MERGE, DType::F32, 0, &args, &data, &[])?;
        compare(&format!("attention_decode {s:?}"), &s, &cache, &q, &rows, &sinks, out.f32(0))?;
    }
    Ok(())
}

fn compare(
    what: &str,
    s: &Shape,
    cache: &Cache,
    q: &[f32],
    rows: &[u32],
    sinks: &[f32],
    out: &[f32],
) -> Result<(), String> {
    for (i, row) in rows.chunks_exact(2).enumerate() {
        let sequence = cache.first.iter().position(|&first| first == row[1] as usize).unwrap();
        let q = &q[i * s.n_head * s.head_dim..][..s.n_head * s.head_dim];
        let (expected, tolerance) = cache.expected(s, q, sequence, row[0] as usize, sinks);
        let out = &out[i * expected.len()..][..expected.len()];
        close(&format!("{what}, row {i}"), out, &expected, |_| tolerance)?;
    }
    Ok(())
}

pub(super) fn prompt(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(8);
    // Sequences as pairs: their length, and the number of their last positions in the batch.
    let cases = [
        (plain(2, 1, 64), &[(3, 3), (70, 40)][..]),
        (Shape { softcap: 0.7, ..plain(2, 2, 80) }, &[(64, 8)]),
        (Shape { sinks: true, ..plain(3, 1, 96) }, &[(65, 2), (1, 1)]),
        (Shape { window: 30, ..plain(2, 2, 112) }, &[(210, 33)]),
        (Shape { window: 100, sinks: true, ..plain(2, 1, 128) }, &[(200, 35)]),
        (Shape { head_dim_v: 128, ..plain(2, 1, 192) }, &[(77, 17)]),
        (plain(2, 1, 256), &[(70, 18)]),
        (plain(1, 1, 512), &[(19, 9)]),
    ];
    for (s, sequences) in cases {
        let lens: Vec<usize> = sequences.iter().map(|&(len, _)| len).collect();
        let mut seen = Vec::new();
        for (len, n) in sequences {
            seen.push(if s.window == 0 { 0 } else { (len - n + 1usize).saturating_sub(s.window) });
        }
        let cache = Cache::new(gpu, &mut lcg, &s, &lens, &seen);
        let tile_rows = prompt_tile_rows(variant(&s)) as usize;
        let (mut rows, mut tiles) = (Vec::new(), Vec::new());
        for (&(len, n), &first) in sequences.iter().zip(&cache.first) {
            for start in (0..n).step_by(tile_rows) {
                tiles.extend([(rows.len() / 2 + start) as u32, tile_rows.min(n - start) as u32]);
            }
            for i in 0..n {
                rows.extend([(len - n + i) as u32, first as u32]);
            }
        }
        let n_rows = rows.len() / 2;
        let (q, sinks) = (lcg.values(n_rows * s.n_head * s.head_dim), sinks(&mut lcg, &s));
        let args = AttentionArgs { n_tiles: tiles.len() as u32 / 2, ..args(&s, &cache, n_rows) };
        let data =
            [Data::F32(&q), Data::U32(&rows), Data::Made(cache.table), Data::U32(&tiles), Data::F32(&sinks), Data::Out];
        let out = gpu.call(&ATTENTION_PROMPT, DType::F32, variant(&s), &args, &data, &cache.pages)?;
        compare(&format!("attention_prompt {s:?}"), &s, &cache, &q, &rows, &sinks, out.f32(0))?;
        // A row alone in its tile must have the same bits.
        let alone: Vec<u32> = (0..n_rows as u32).flat_map(|row| [row, 1]).collect();
        if n_rows <= 4 {
            let args = AttentionArgs { n_tiles: n_rows as u32, ..args };
            let data = [
                Data::F32(&q),
                Data::U32(&rows),
                Data::Made(cache.table),
                Data::U32(&alone),
                Data::F32(&sinks),
                Data::Out,
            ];
            let single = gpu.call(&ATTENTION_PROMPT, DType::F32, variant(&s), &args, &data, &cache.pages)?;
            same("attention_prompt, rows alone", single.f32(0), out.f32(0))?;
        }
    }
    Ok(())
}

pub(super) fn append(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(9);
    for (n_head_kv, head_dim, head_dim_v) in [(1, 8, 8), (3, 80, 64), (2, 24, 72)] {
        let s = Shape { head_dim_v, ..plain(n_head_kv, n_head_kv, head_dim) };
        let positions = [0usize, 63, 64, 130];
        let (keys, values) = (lcg.values(4 * n_head_kv * head_dim), lcg.values(4 * n_head_kv * head_dim_v));
        let page_len = value_offset(&s) + n_head_kv * POSITIONS * head_dim_v;
        let zeros = vec![0u8; 2 * page_len];
        let pages: Vec<Handle> = (0..3).map(|_| gpu.stage.filled(&zeros, 2)).collect();
        let table = gpu.stage.empty(4 * 8, 8);
        for (i, page) in pages.iter().enumerate() {
            gpu.stage.point(table, 8 * (i as u64 + 1), *page); // the table begins at its second entry
        }
        let rows: Vec<u32> = positions.iter().flat_map(|&pos| [pos as u32, 1]).collect();
        let args = AppendArgs {
            n_rows: 4,
            n_pages: 4,
            n_head_kv: n_head_kv as u32,
            head_dim: head_dim as u32,
            head_dim_v: head_dim_v as u32,
            key_offset: key_offset() as u32,
            value_offset: value_offset(&s) as u32,
        };
        let data = [Data::F32(&keys), Data::F32(&values), Data::U32(&rows), Data::Made(table)];
        gpu.call(&APPEND, DType::F32, 0, &args, &data, &pages)?;
        let mut expected = vec![vec![f16::ZERO; page_len]; 3];
        for (row, pos) in positions.iter().enumerate() {
            for (from, offset, width) in [(&keys, key_offset(), head_dim), (&values, value_offset(&s), head_dim_v)] {
                for head in 0..n_head_kv {
                    let to = offset + (head * POSITIONS + pos % POSITIONS) * width;
                    let from = &from[(row * n_head_kv + head) * width..][..width];
                    Arch::scalar().f32_to_f16(from, &mut expected[pos / POSITIONS][to..][..width]);
                }
            }
        }
        for (page, expected) in pages.iter().zip(&expected) {
            let bytes = gpu.stage.read(*page)?;
            same("append", bytemuck::cast_slice::<u8, u16>(&bytes), bytemuck::cast_slice(expected))?;
        }
    }
    Ok(())
}

/// Attention of one query row over adjacent keys and values, span by span.
fn attend(y: &mut [f32], q: &[f32], k: &[f16], v: &[f16], range: (u32, u32), p: &AttnParams) {
    let arch = Arch::scalar();
    // Blocks are whole; keys after the last one are not seen.
    let whole = |x: &[f16], dim: usize| {
        let mut x = x.to_vec();
        x.resize(x.len().next_multiple_of(KV_BLOCK * dim), f16::ZERO);
        x
    };
    let (k, v) = (whole(k, p.head_dim), whole(v, p.head_dim_v));
    let blocks = k.chunks_exact(KV_BLOCK * p.head_dim).zip(v.chunks_exact(KV_BLOCK * p.head_dim_v));
    let blocks: Vec<KvBlock<'_, f16>> = blocks.map(|(k, v)| KvBlock { k, v }).collect();
    let mut total = AttnPartial { out: y, max: &mut [0.0], sum: &mut [0.0] };
    total.clear();
    for (i, blocks) in blocks.chunks(KV_SPAN / KV_BLOCK).enumerate() {
        arch.attention(&mut total, q, KvSpan { first: i * KV_SPAN, blocks }, &[range], p);
    }
    arch.attention_finish(&mut total, p);
}
