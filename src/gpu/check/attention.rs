//! Attention over page tables, and appending to them.

use crate::arch::{Arch, AttnParams, AttnPartial, KV_BLOCK, KV_SPAN, KvBlock, KvSpan, KvType};
use crate::gpu::check::{Checker, Data, EPS, FAST, Handle, Lcg, close, same};
use crate::gpu::kernels::*;
use crate::layers::attention::spec::AttnSpec;
use crate::quant::DType;
use KvType::{F16, Q4, Q5, Q6, Q8};
use std::ops::Range;

/// Shape of a layer's attention.
#[derive(Clone, Copy, Debug)]
struct Shape {
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    head_dim_v: usize,
    window: usize,
    /// Whether rows see the chunk of the window's size that they are in instead.
    chunked: bool,
    softcap: f32,
    sinks: bool,
    /// ALiBi's exponent, or 0.
    alibi: f32,
    /// Precision of keys and of values.
    types: [KvType; 2],
}

/// A layer without window, cap, sinks and ALiBi, whose values are as wide as its keys, in f16.
const fn plain(n_head: usize, n_head_kv: usize, head_dim: usize) -> Shape {
    let (head_dim_v, types) = (head_dim, [KvType::F16; 2]);
    Shape {
        n_head,
        n_head_kv,
        head_dim,
        head_dim_v,
        window: 0,
        chunked: false,
        softcap: 0.0,
        sinks: false,
        alibi: 0.0,
        types,
    }
}

impl Shape {
    /// Width and precision of keys and of values, with the byte offset of the layer's first block
    /// in a page.
    fn parts(&self) -> [(usize, KvType, usize); 2] {
        let [k, v] = self.types;
        let of_keys = self.n_head_kv * k.block_bytes(self.head_dim);
        [
            (self.head_dim, k, BEFORE),
            (self.head_dim_v, v, BEFORE + of_keys),
        ]
    }

    fn page_bytes(&self) -> usize {
        let [_, (dim, kind, offset)] = self.parts();
        offset + self.n_head_kv * kind.block_bytes(dim)
    }
}

/// ALiBi with a number of heads that is no power of two.
const ALIBI: Shape = Shape {
    alibi: 3.0,
    ..plain(6, 2, 64)
};
const CHUNKED: Shape = Shape {
    window: 100,
    chunked: true,
    ..plain(4, 2, 64)
};
/// The absorbed form of latent attention.
const LATENT: Shape = Shape {
    head_dim_v: 512,
    ..plain(3, 1, 576)
};
const QUANTISED_LATENT: Shape = Shape {
    types: [Q8, Q4],
    ..LATENT
};

const POSITIONS: usize = PAGE_POSITIONS as usize;
/// Bytes of a page before the layer's keys and values, as if of another layer.
const BEFORE: usize = 48;
/// Alignment of pages, at least: bits of quantised values are read as 32-bit words.
const PAGE_ALIGN: u64 = 4;

/// A sequence: keys and values of its positions as they are stored, `(n_head_kv, len, head_dim)`.
struct Sequence {
    keys: Vec<f32>,
    values: Vec<f32>,
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

/// A block with these rows, and the rows as they are stored. 64-bit words, as blocks are aligned.
fn block_of(kind: KvType, dim: usize, rows: &mut [f32]) -> Vec<u64> {
    let mut block = vec![0u64; kind.block_bytes(dim) / 8];
    for (i, row) in rows.chunks_exact(dim).enumerate() {
        Arch::scalar().store_kv(kind, bytemuck::cast_slice_mut(&mut block), i, row);
    }
    Arch::scalar().load_kv(kind, bytemuck::cast_slice(&block), dim, rows);
    block
}

/// Byte ranges of rows in a block, one per plane.
fn rows_of(kind: KvType, dim: usize, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut plane = 0;
    kind.row_bytes(dim).into_iter().map(move |bytes| {
        let start = plane;
        plane += POSITIONS * bytes;
        start + rows.start * bytes..start + rows.end * bytes
    })
}

impl Cache {
    /// Makes sequences of these lengths; the pages before position `seen` of a sequence are
    /// missing. Pages are shuffled, and filled only up to the last position.
    fn new(
        gpu: &mut Checker<'_>,
        lcg: &mut Lcg,
        s: &Shape,
        lens: &[usize],
        seen: &[usize],
    ) -> Cache {
        let n_pages = lens.iter().map(|len| len.div_ceil(POSITIONS)).sum();
        let table = gpu.stage.empty(n_pages as u64 * 8, 8);
        let mut cache = Cache {
            sequences: vec![],
            pages: vec![],
            table,
            n_pages,
            first: vec![],
        };
        let mut next = 0;
        for (&len, &seen) in lens.iter().zip(seen) {
            cache.first.push(next);
            let mut all = [s.head_dim, s.head_dim_v].map(|dim| lcg.values(s.n_head_kv * len * dim));
            for page in 0..len.div_ceil(POSITIONS) {
                if (page + 1) * POSITIONS > seen {
                    let id = gpu.stage.empty(s.page_bytes() as u64, PAGE_ALIGN);
                    let filled = POSITIONS.min(len - page * POSITIONS);
                    for (all, (dim, kind, offset)) in all.iter_mut().zip(s.parts()) {
                        for head in 0..s.n_head_kv {
                            let rows =
                                &mut all[(head * len + page * POSITIONS) * dim..][..filled * dim];
                            let block = block_of(kind, dim, rows);
                            let to = offset + head * kind.block_bytes(dim);
                            for plane in
                                rows_of(kind, dim, 0..filled).filter(|plane| !plane.is_empty())
                            {
                                let at = (to + plane.start) as u64;
                                gpu.stage.fill(id, at, &bytemuck::cast_slice(&block)[plane]);
                            }
                        }
                    }
                    gpu.stage.point(table, 8 * next as u64, id);
                    cache.pages.push(id);
                }
                next += 1;
            }
            let [keys, values] = all;
            cache.sequences.push(Sequence { keys, values, len });
        }
        cache
    }

    /// Attention of one row by the scalar level, and its tolerance.
    fn expected(
        &self,
        s: &Shape,
        q: &[f32],
        sequence: usize,
        pos: usize,
        sinks: &[f32],
    ) -> (Vec<f32>, f32) {
        let Sequence { keys, values, len } = &self.sequences[sequence];
        let largest = |x: &[f32]| x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let (largest_key, largest_value) = (largest(keys), largest(values));
        let start = first_seen(s, pos);
        let heads = AttnSpec {
            n_head: s.n_head,
            alibi: Some(s.alibi).filter(|&alibi| alibi > 0.0),
            ..AttnSpec::default()
        };
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
                slope: heads.slope(head),
                exact: s.alibi > 0.0,
            };
            let mut y = vec![0.0; s.head_dim_v];
            attend(&mut y, q, k, v, (start as u32, pos as u32 + 1), &p);
            // A sink takes a part of the weights: the output is `y · Σe / (Σe + e^sink)`.
            let score = |j: usize| {
                let product: f32 = (0..s.head_dim).map(|i| q[i] * k[j * s.head_dim + i]).sum();
                let score = product * p.scale;
                let capped = if s.softcap > 0.0 {
                    s.softcap * (score / s.softcap).tanh()
                } else {
                    score
                };
                capped - p.slope * (pos - j) as f32
            };
            let sum: f64 = (start..=pos).map(|j| f64::from(score(j)).exp()).sum();
            let share = sum / (sum + f64::from(sinks[head]).exp());
            out.extend(y.iter().map(|y| (f64::from(*y) * share) as f32));
            // Errors of scores become relative errors of weights, in numerator and denominator;
            // then come the sums over the keys.
            let magnitude: f32 = q.iter().map(|q| q.abs()).sum::<f32>() * p.scale * largest_key;
            let of_slope = FAST * p.slope * (pos - start) as f32;
            let of_score = s.head_dim as f32 * EPS * magnitude + of_slope;
            let of_weights = 4.0 * of_score + 2.0 * (pos + 1 - start) as f32 * EPS + 2.0 * FAST;
            tolerance = tolerance.max(of_weights * largest_value);
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
    (0..s.n_head)
        .map(|_| if s.sinks { 3.0 * lcg.signed() } else { -1e30 })
        .collect()
}

fn args(s: &Shape, cache: &Cache, n_rows: usize) -> AttentionArgs {
    AttentionArgs {
        n_rows: n_rows as u32,
        n_head: s.n_head as u32,
        n_head_kv: s.n_head_kv as u32,
        head_dim: s.head_dim as u32,
        head_dim_v: s.head_dim_v as u32,
        key_offset: s.parts()[0].2 as u32,
        value_offset: s.parts()[1].2 as u32,
        key_bits: s.types[0].bits() as u32,
        value_bits: s.types[1].bits() as u32,
        window: s.window as u32,
        chunked: s.chunked.into(),
        n_pages: cache.n_pages as u32,
        scale: scale(s),
        softcap: s.softcap,
        alibi: s.alibi,
        ..AttentionArgs::default()
    }
}

/// First position that a row at `pos` sees.
fn first_seen(s: &Shape, pos: usize) -> usize {
    match s.window {
        0 => 0,
        window if s.chunked => pos - pos % window,
        window => (pos + 1).saturating_sub(window),
    }
}

/// Number of splits that a row at `pos` sees.
fn n_splits(s: &Shape, pos: usize) -> usize {
    pos / SPLIT as usize - first_seen(s, pos) / SPLIT as usize + 1
}

/// Shapes, and the lengths of the sequences of which each has a row.
const DECODE: &[(Shape, &[usize])] = &[
    (plain(2, 1, 64), &[1, 65]),
    (ALIBI, &[300, 7]),
    (CHUNKED, &[300, 127, 101]),
    (LATENT, &[140]),
    (QUANTISED_LATENT, &[66]),
    (
        Shape {
            softcap: 0.7,
            ..plain(3, 3, 80)
        },
        &[64, 9],
    ),
    (
        Shape {
            sinks: true,
            ..plain(9, 1, 96)
        },
        &[70],
    ),
    (
        Shape {
            window: 30,
            ..plain(4, 2, 112)
        },
        &[600, 29, 131],
    ),
    (
        Shape {
            window: 100,
            sinks: true,
            ..plain(8, 1, 128)
        },
        &[560],
    ),
    (plain(2, 1, 128), &[1100, 5]),
    (
        Shape {
            head_dim_v: 128,
            ..plain(5, 1, 192)
        },
        &[66],
    ),
    (plain(5, 1, 256), &[41]),
    (plain(3, 1, 512), &[33]),
    (
        Shape {
            types: [Q8, Q8],
            softcap: 0.7,
            ..plain(3, 1, 80)
        },
        &[70, 129],
    ),
    (
        Shape {
            types: [Q8, F16],
            window: 100,
            sinks: true,
            ..plain(9, 1, 96)
        },
        &[200],
    ),
    (
        Shape {
            types: [Q4, Q6],
            window: 30,
            ..plain(2, 2, 112)
        },
        &[131, 600],
    ),
    (
        Shape {
            types: [Q5, F16],
            head_dim_v: 128,
            ..plain(2, 1, 192)
        },
        &[66],
    ),
    (
        Shape {
            types: [F16, Q4],
            ..plain(2, 1, 256)
        },
        &[41],
    ),
    (
        Shape {
            types: [Q6, Q5],
            ..plain(3, 1, 512)
        },
        &[33],
    ),
];

pub(super) fn decode(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(7);
    for &(s, lens) in DECODE {
        let seen: Vec<usize> = lens.iter().map(|len| first_seen(&s, len - 1)).collect();
        let cache = Cache::new(gpu, &mut lcg, &s, lens, &seen);
        let (q, sinks) = (
            lcg.values(lens.len() * s.n_head * s.head_dim),
            sinks(&mut lcg, &s),
        );
        let rows: Vec<u32> = lens
            .iter()
            .zip(&cache.first)
            .flat_map(|(len, first)| [*len as u32 - 1, *first as u32])
            .collect();
        let most = lens.iter().map(|len| n_splits(&s, len - 1)).max().unwrap();
        let args = AttentionArgs {
            n_splits: most as u32,
            ..args(&s, &cache, lens.len())
        };

        // Splits that a row lacks stay unwritten, so both kernels share the buffer.
        let partial = gpu
            .stage
            .empty((ATTENTION_DECODE.buffers[3].len)(&args) * 4, 4);
        let data = [
            Data::F32(&q),
            Data::U32(&rows),
            Data::Made(cache.table),
            Data::Made(partial),
        ];
        gpu.call(
            &ATTENTION_DECODE,
            DType::F32,
            variant(&s),
            &args,
            &data,
            &cache.pages,
        )?;
        let data = [
            Data::Made(partial),
            Data::U32(&rows),
            Data::F32(&sinks),
            Data::Out,
        ];
        let out = gpu.call(&ATTENTION_MERGE, DType::F32, 0, &args, &data, &[])?;
        compare(
            &format!("attention_decode {s:?}"),
            &s,
            &cache,
            &q,
            &rows,
            &sinks,
            out.f32(0),
        )?;
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
        let sequence = cache
            .first
            .iter()
            .position(|&first| first == row[1] as usize)
            .unwrap();
        let q = &q[i * s.n_head * s.head_dim..][..s.n_head * s.head_dim];
        let (expected, tolerance) = cache.expected(s, q, sequence, row[0] as usize, sinks);
        let out = &out[i * expected.len()..][..expected.len()];
        close(&format!("{what}, row {i}"), out, &expected, |_| tolerance)?;
    }
    Ok(())
}

/// Shapes, and sequences: their length, and the number of their last positions in the batch.
const PROMPTS: &[(Shape, &[(usize, usize)])] = &[
    (plain(2, 1, 64), &[(3, 3), (70, 40)]),
    (ALIBI, &[(150, 34)]),
    (CHUNKED, &[(210, 33)]),
    (LATENT, &[(70, 9)]),
    (QUANTISED_LATENT, &[(66, 3)]),
    (
        Shape {
            softcap: 0.7,
            ..plain(2, 2, 80)
        },
        &[(64, 8)],
    ),
    (
        Shape {
            sinks: true,
            ..plain(3, 1, 96)
        },
        &[(65, 2), (1, 1)],
    ),
    (
        Shape {
            window: 30,
            ..plain(2, 2, 112)
        },
        &[(210, 33)],
    ),
    (
        Shape {
            window: 100,
            sinks: true,
            ..plain(2, 1, 128)
        },
        &[(200, 35)],
    ),
    (
        Shape {
            head_dim_v: 128,
            ..plain(2, 1, 192)
        },
        &[(77, 17)],
    ),
    (plain(2, 1, 256), &[(70, 18)]),
    (plain(1, 1, 512), &[(19, 9)]),
    (
        Shape {
            types: [Q8, Q8],
            ..plain(2, 1, 80)
        },
        &[(70, 9)],
    ),
    (
        Shape {
            types: [Q4, Q6],
            window: 30,
            ..plain(2, 2, 112)
        },
        &[(131, 5)],
    ),
    (
        Shape {
            types: [Q5, F16],
            head_dim_v: 128,
            ..plain(2, 1, 192)
        },
        &[(66, 17)],
    ),
    (
        Shape {
            types: [F16, Q4],
            ..plain(2, 1, 256)
        },
        &[(70, 3)],
    ),
    (
        Shape {
            types: [Q6, Q5],
            ..plain(1, 1, 512)
        },
        &[(19, 9)],
    ),
];

pub(super) fn prompt(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(8);
    for &(s, sequences) in PROMPTS {
        let lens: Vec<usize> = sequences.iter().map(|&(len, _)| len).collect();
        let of_first = |(len, n): &(usize, usize)| first_seen(&s, len - n);
        let seen: Vec<usize> = sequences.iter().map(of_first).collect();
        let cache = Cache::new(gpu, &mut lcg, &s, &lens, &seen);
        let tile_rows = prompt_tile_rows(variant(&s)) as usize;
        let (mut rows, mut tiles) = (Vec::new(), Vec::new());
        for (&(len, n), &first) in sequences.iter().zip(&cache.first) {
            for start in (0..n).step_by(tile_rows) {
                tiles.extend([
                    (rows.len() / 2 + start) as u32,
                    tile_rows.min(n - start) as u32,
                ]);
            }
            for i in 0..n {
                rows.extend([(len - n + i) as u32, first as u32]);
            }
        }
        let n_rows = rows.len() / 2;
        let (q, sinks) = (
            lcg.values(n_rows * s.n_head * s.head_dim),
            sinks(&mut lcg, &s),
        );
        let args = AttentionArgs {
            n_tiles: tiles.len() as u32 / 2,
            ..args(&s, &cache, n_rows)
        };
        let data = [
            Data::F32(&q),
            Data::U32(&rows),
            Data::Made(cache.table),
            Data::U32(&tiles),
            Data::F32(&sinks),
            Data::Out,
        ];
        let out = gpu.call(
            &ATTENTION_PROMPT,
            DType::F32,
            variant(&s),
            &args,
            &data,
            &cache.pages,
        )?;
        compare(
            &format!("attention_prompt {s:?}"),
            &s,
            &cache,
            &q,
            &rows,
            &sinks,
            out.f32(0),
        )?;
        // A row alone in its tile must have the same bits.
        let alone: Vec<u32> = (0..n_rows as u32).flat_map(|row| [row, 1]).collect();
        if n_rows <= 4 {
            let args = AttentionArgs {
                n_tiles: n_rows as u32,
                ..args
            };
            let data = [
                Data::F32(&q),
                Data::U32(&rows),
                Data::Made(cache.table),
                Data::U32(&alone),
                Data::F32(&sinks),
                Data::Out,
            ];
            let single = gpu.call(
                &ATTENTION_PROMPT,
                DType::F32,
                variant(&s),
                &args,
                &data,
                &cache.pages,
            )?;
            same("attention_prompt, rows alone", single.f32(0), out.f32(0))?;
        }
    }
    Ok(())
}

/// Groups of smaller values are stored as zeros.
const TINY: f32 = 1e-30;

pub(super) fn append(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(9);
    let cases = [
        plain(1, 1, 8),
        Shape {
            head_dim_v: 64,
            ..plain(3, 3, 80)
        },
        Shape {
            head_dim_v: 72,
            types: [Q8, F16],
            ..plain(2, 2, 24)
        },
        Shape {
            types: [Q4, Q8],
            ..plain(3, 3, 80)
        },
        Shape {
            head_dim_v: 96,
            types: [Q6, Q5],
            ..plain(1, 1, 104)
        },
    ];
    for s in cases {
        let positions = [0usize, 63, 64, 130];
        let mut all = [s.head_dim, s.head_dim_v].map(|dim| lcg.values(4 * s.n_head_kv * dim));
        // Quantised groups that are all but zero, have their largest value at the end of the codes,
        // or become NaN.
        for x in &mut all {
            x.iter_mut().take(32).for_each(|x| *x *= TINY / 2.0);
            *x.last_mut().unwrap() = 1.0;
        }
        if s.types[1] != F16 {
            all[1][s.head_dim_v] = f32::INFINITY;
        }
        let zeros = vec![0u8; s.page_bytes()];
        let pages: Vec<Handle> = (0..3)
            .map(|_| gpu.stage.filled(&zeros, PAGE_ALIGN))
            .collect();
        let table = gpu.stage.empty(4 * 8, 8);
        for (i, page) in pages.iter().enumerate() {
            gpu.stage.point(table, 8 * (i as u64 + 1), *page); // the table begins at its second entry
        }
        let rows: Vec<u32> = positions.iter().flat_map(|&pos| [pos as u32, 1]).collect();
        let args = AppendArgs {
            n_rows: 4,
            n_pages: 4,
            n_head_kv: s.n_head_kv as u32,
            head_dim: s.head_dim as u32,
            head_dim_v: s.head_dim_v as u32,
            key_offset: s.parts()[0].2 as u32,
            value_offset: s.parts()[1].2 as u32,
            key_bits: s.types[0].bits() as u32,
            value_bits: s.types[1].bits() as u32,
        };
        let data = [
            Data::F32(&all[0]),
            Data::F32(&all[1]),
            Data::U32(&rows),
            Data::Made(table),
        ];
        gpu.call(&APPEND, DType::F32, 0, &args, &data, &pages)?;
        let mut contents = Vec::new();
        for page in &pages {
            contents.push(gpu.stage.read(*page)?);
        }
        for (row, pos) in positions.iter().enumerate() {
            for (from, (dim, kind, offset)) in all.iter().zip(s.parts()) {
                for head in 0..s.n_head_kv {
                    let x = &from[(row * s.n_head_kv + head) * dim..][..dim];
                    let to = offset + head * kind.block_bytes(dim);
                    let block = &mut contents[pos / POSITIONS][to..][..kind.block_bytes(dim)];
                    row_is_stored(
                        &format!("append {s:?}, row {row}"),
                        kind,
                        block,
                        pos % POSITIONS,
                        x,
                    )?;
                    rows_of(kind, dim, pos % POSITIONS..pos % POSITIONS + 1)
                        .for_each(|row| block[row].fill(0));
                }
            }
        }
        for page in &contents {
            same(&format!("append {s:?}, other rows"), page, &zeros)?;
        }
    }
    Ok(())
}

/// Checks that row `i` of a block is `x`: in f16 with the scalar level's bits; otherwise with its
/// scales, and values within half a step. A code is `x / scale + 128` without its fraction,
/// computed with a relative error of `FAST`.
fn row_is_stored(
    what: &str,
    kind: KvType,
    block: &[u8],
    i: usize,
    x: &[f32],
) -> Result<(), String> {
    let dim = x.len();
    let expected = block_of(kind, dim, &mut x.to_vec());
    let [first, _, scales] =
        [0, 1, 2].map(|plane| move |i| rows_of(kind, dim, i..i + 1).nth(plane).unwrap_or(0..0));
    if !kind.is_quantized() {
        return same(
            what,
            &block[first(i)],
            &bytemuck::cast_slice(&expected)[first(0)],
        );
    }
    same(
        &format!("{what}, scales"),
        &block[scales(i)],
        &bytemuck::cast_slice(&expected)[scales(0)],
    )?;
    let mut aligned = vec![0u64; block.len() / 8];
    bytemuck::cast_slice_mut(&mut aligned).copy_from_slice(block);
    let mut stored = vec![0.0; (i + 1) * dim];
    Arch::scalar().load_kv(kind, bytemuck::cast_slice(&aligned), dim, &mut stored);
    let stored = &stored[i * dim..];
    let unit = (1 << (8 - kind.bits())) as f32;
    let scales = block[scales(i)]
        .chunks_exact(2)
        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16));
    for ((stored, x), scale) in stored.chunks(32).zip(x.chunks(32)).zip(scales) {
        if scale.is_nan() {
            if !stored.iter().all(|x| x.is_nan()) {
                return Err(format!("result: {what}: {stored:?} instead of NaN"));
            }
        } else {
            close(what, stored, x, |_| {
                scale * (unit / 2.0 + 256.0 * FAST) + TINY
            })?;
        }
    }
    Ok(())
}

pub(super) fn hadamard(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(10);
    for (n, n_rows) in [(8, 1), (80, 5), (96, 2), (192, 3), (512, 2), (576, 5)] {
        let x = lcg.values(n * n_rows);
        let side = 1 << n.trailing_zeros();
        let factor = 1.0 / (side as f32).sqrt();
        let args = HadamardArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            log_side: n.trailing_zeros(),
            factor,
        };
        let out = gpu.call(&HADAMARD, DType::F32, 0, &args, &[Data::F32(&x)], &[])?;
        let mut expected = x.clone();
        expected
            .chunks_exact_mut(n)
            .for_each(|head| Arch::scalar().hadamard(head));
        // Each of the sums of a run errs by an `EPS` of its magnitudes, and so does the product
        // with the factor.
        let magnitude = |i: usize| {
            x[i / side * side..][..side]
                .iter()
                .map(|x| x.abs())
                .sum::<f32>()
                * factor
        };
        let tolerance = |i| 2.0 * (n.trailing_zeros() + 1) as f32 * EPS * magnitude(i);
        close(&format!("hadamard {n}"), out.f32(0), &expected, tolerance)?;
    }
    Ok(())
}

/// Attention of one query row over adjacent keys and values, span by span.
fn attend(y: &mut [f32], q: &[f32], k: &[f32], v: &[f32], range: (u32, u32), p: &AttnParams) {
    let arch = Arch::scalar();
    // Blocks are whole; keys after the last one are not seen.
    let whole = |x: &[f32], dim: usize| {
        let mut x = x.to_vec();
        x.resize(x.len().next_multiple_of(KV_BLOCK * dim), 0.0);
        x
    };
    let (k, v) = (whole(k, p.head_dim), whole(v, p.head_dim_v));
    let blocks = k
        .chunks_exact(KV_BLOCK * p.head_dim)
        .zip(v.chunks_exact(KV_BLOCK * p.head_dim_v));
    let blocks: Vec<KvBlock<'_, f32>> = blocks.map(|(k, v)| KvBlock { k, v }).collect();
    let mut total = AttnPartial {
        out: y,
        max: &mut [0.0],
        sum: &mut [0.0],
    };
    total.clear();
    for (i, blocks) in blocks.chunks(KV_SPAN / KV_BLOCK).enumerate() {
        arch.attention(
            &mut total,
            q,
            KvSpan {
                first: i * KV_SPAN,
                blocks,
            },
            &[range],
            p,
        );
    }
    arch.attention_finish(&mut total, p);
}
