//! The only place where a weight is multiplied.

use super::arena::Frame;
use crate::arch::{ActForm, Acts, Arch, BlockP16, BlockQ8, BlockQ16, ColumnsMut};
use crate::gguf::Gguf;
use crate::lora::{Attached, Gradients};
use crate::model::{Linear, Model, Weight};
use crate::quant::DType;
use crate::team::Crew;
use bytemuck::Pod;
use std::ops::Range;

/// Weight bytes of one [`Arch::matvec`] task. Kernels prefetch some kilobytes ahead, at the end of a
/// task in vain, so larger tasks waste less (from 48 to 768 KiB decoding gained a tenth to a quarter).
const TASK_BYTES: std::ops::RangeInclusive<usize> = 48 << 10..=2 << 20;
/// Tasks of a product for each thread, within [`TASK_BYTES`]: so many that the threads end together.
const TASKS_PER_THREAD: usize = 4;
/// Rows per task are a multiple of this, the most that kernels take at a time.
const TASK_ROWS: usize = 16;
/// Rows per task of [`Arch::gemm`] are a multiple of this, the height of its panels.
const PANEL_ROWS: usize = 32;
/// Activation rows that one task multiplies by the `A` of an adapter.
const LOW_ROWS: usize = 16;
/// Columns of an adapter's gradient that one task adds to: so few that what it reads of 512 tokens stays
/// in the L2 cache from one row of the adapter to the next.
const LOW_COLUMNS: usize = 128;
/// Activations that are worth sharing among threads to round them: some microseconds of work.
const SHARED_VALUES: usize = 16 << 10;
/// Most products that one call of [`linear`] is given.
const MAX_PRODUCTS: usize = 3;

/// What a product needs besides its operands.
#[derive(Clone, Copy)]
pub(crate) struct Ctx<'a> {
    pub(crate) arch: Arch,
    pub(crate) crew: &'a Crew<'a>,
    pub(crate) gguf: &'a Gguf,
    pub(crate) adapters: &'a [Attached],
}

/// One product: `y = W·x (+ b)` and what adapters add to it, `y` is `(m, n_out)`.
pub(crate) struct Product<'a> {
    w: &'a Weight,
    b: Option<&'a [f32]>,
    y: ColumnsMut<'a>,
    /// Where its adapters' `s·A·x` begin in [`Scratch::low`].
    low: usize,
}

impl<'a> Product<'a> {
    pub(crate) fn of(linear: &'a Linear, y: &'a mut [f32], m: usize) -> Product<'a> {
        Product { b: linear.b.as_deref(), ..Product::of_weight(&linear.w, y, m) }
    }

    pub(crate) fn of_weight(w: &'a Weight, y: &'a mut [f32], m: usize) -> Product<'a> {
        Product { w, b: None, y: ColumnsMut::new(y, m, w.n_out), low: 0 }
    }
}

/// Room for activations of up to `m` rows in the forms that products read.
pub(crate) struct Scratch<'a> {
    prepared: &'a mut [u8],
    /// `s·A·x` of every product and adapter, each `(m, rank)`.
    low: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    /// For products of up to `m` rows with any matrix of `model`; `rank` is that of all adapters together.
    pub(crate) fn take(frame: &mut Frame<'a>, model: &Model, m: usize, rank: usize) -> Scratch<'a> {
        let shapes = model.weights().shapes.iter();
        let prepared = shapes.map(|&(dtype, n)| prepared_len(model.arch(), dtype, m, n)).max();
        Scratch { prepared: frame.take(prepared.unwrap_or(0)), low: frame.take(MAX_PRODUCTS * m * rank) }
    }
}

/// Bytes that up to `m` rows of `n` values take in the form that products with weights of `dtype` read.
fn prepared_len(arch: Arch, dtype: DType, m: usize, n: usize) -> usize {
    let gemm_min_rows = arch.gemm_min_rows(dtype);
    // The 8-bit form is shorter than the 16-bit ones, which are of one size.
    const _: () = assert!(size_of::<BlockP16>() == size_of::<BlockQ16>());
    let rounded = m.min(gemm_min_rows.saturating_sub(1)) * BlockQ16::per_row(n) * size_of::<BlockQ16>();
    if m >= gemm_min_rows { rounded.max(arch.packed_len(dtype, m, n)) } else { rounded }
}

/// Bytes of [`Scratch::low`] for `m` rows and adapters whose ranks sum to `rank`.
pub(crate) fn low_bytes(m: usize, rank: usize) -> u64 {
    (MAX_PRODUCTS as u64).saturating_mul(m as u64).saturating_mul(4 * rank as u64)
}

/// How the rows of one product are multiplied.
#[derive(Clone, Copy, PartialEq)]
enum Path {
    Matvec(ActForm),
    Gemm,
}

/// Activations as the kernels of some products read them.
enum Prepared<'a> {
    Acts(Acts<'a>),
    /// Rows of `n` values, packed.
    Packed {
        packed: &'a [u8],
        n: usize,
    },
}

impl Prepared<'_> {
    /// Rows of `w` that one task multiplies. A row's result does not depend on it.
    fn task_rows(&self, ctx: Ctx<'_>, w: &Weight) -> usize {
        let share = w.n_out / (ctx.crew.n_threads() * TASKS_PER_THREAD);
        if let Prepared::Packed { .. } = self {
            return share.next_multiple_of(PANEL_ROWS).clamp(PANEL_ROWS, ctx.arch.gemm_tile(w.dtype));
        }
        let bytes = (share * w.row_bytes()).clamp(*TASK_BYTES.start(), *TASK_BYTES.end());
        (bytes / w.row_bytes()).next_multiple_of(TASK_ROWS).max(TASK_ROWS)
    }

    fn multiply(&self, arch: Arch, dtype: DType, w: &[u8], y: &mut ColumnsMut<'_>) {
        match self {
            Prepared::Acts(x) => arch.matvec(dtype, y, w, x),
            Prepared::Packed { packed, n } => arch.gemm(dtype, y, w, packed, *n),
        }
    }
}

fn path(arch: Arch, dtype: DType, m: usize) -> Path {
    if m >= arch.gemm_min_rows(dtype) { Path::Gemm } else { Path::Matvec(arch.act_form(dtype, m)) }
}

/// All `products` of the same activations `x` (`m` rows), in as few regions as their forms allow.
pub(crate) fn linear(ctx: Ctx<'_>, scratch: &mut Scratch<'_>, x: &[f32], m: usize, products: &mut [Product<'_>]) {
    assert!(products.iter().all(|p| x.len() == m * p.w.n_in), "linear: {m} rows in {} values", x.len());
    let Scratch { prepared, low } = scratch;
    project(ctx, low, x, m, products);
    let mut rest = products;
    while let Some((first, _)) = rest.split_first() {
        // Products that read the same form of `x` share one region.
        let w = first.w;
        let how = path(ctx.arch, w.dtype, m);
        let alike = |p: &Product<'_>| {
            path(ctx.arch, p.w.dtype, m) == how && (how != Path::Gemm || ctx.arch.same_packing(p.w.dtype, w.dtype))
        };
        let n = rest.iter().take_while(|p| alike(p)).count();
        let (group, tail) = rest.split_at_mut(n);
        let x = prepare(ctx, prepared, x, m, w);
        ctx.crew.for_tiles(group, |p| (&p.y, x.task_rows(ctx, p.w)), |p, rows, y| multiply(ctx, &x, low, p, rows, y));
        rest = tail;
    }
}

/// Leaves `s·A·x` of every product and adapter in `low`.
fn project(ctx: Ctx<'_>, low: &mut [f32], x: &[f32], m: usize, products: &mut [Product<'_>]) {
    let mut end = 0;
    for i in 0..products.len() {
        let (before, rest) = products.split_at_mut(i);
        let p = &mut rest[0];
        // Parts of one matrix have one `A`.
        if let Some(same) = before.iter().find(|b| b.w.site == p.w.site) {
            p.low = same.low;
            continue;
        }
        p.low = end;
        for (term, factor) in ctx.adapters.iter().filter_map(|a| a.term(p.w.site)) {
            let (n, rank) = (p.w.n_in, term.rank());
            let t = &mut low[end..end + m * rank];
            end += m * rank;
            ctx.crew.when(m > 1).for_chunks(t, LOW_ROWS * rank, |i, t| {
                let rows = t.len() / rank;
                let x = Acts::F32 { x: &x[i * LOW_ROWS * n..][..rows * n], n };
                let a = bytemuck::cast_slice(term.a());
                ctx.arch.matvec(DType::F32, &mut ColumnsMut::new(t, rows, rank), a, &x);
                t.iter_mut().for_each(|t| *t *= factor);
            });
        }
    }
}

/// The first `n` blocks that have room in `bytes`.
fn blocks<T: Pod>(bytes: &mut [u8], n: usize) -> &mut [T] {
    bytemuck::cast_slice_mut(&mut bytes[..n * size_of::<T>()])
}

/// The `m` rows of `x` in the form that products with `w` and its like read.
fn prepare<'a>(ctx: Ctx<'_>, room: &'a mut [u8], x: &'a [f32], m: usize, w: &Weight) -> Prepared<'a> {
    let (n, dtype) = (w.n_in, w.dtype);
    let workers = ctx.crew.when(m > 1 && x.len() >= SHARED_VALUES);
    let row = |i: usize| &x[i * n..][..n];
    match path(ctx.arch, dtype, m) {
        Path::Matvec(ActForm::F32) => Prepared::Acts(Acts::F32 { x, n }),
        Path::Matvec(ActForm::Q16) => {
            let blocks = blocks(room, m * BlockQ16::per_row(n));
            workers.for_chunks(blocks, BlockQ16::per_row(n), |i, blocks| ctx.arch.quantize_q16(row(i), blocks));
            Prepared::Acts(Acts::Q16 { x: blocks, n })
        }
        Path::Matvec(ActForm::P16) => {
            let blocks = blocks(room, m * BlockP16::per_row(n));
            workers.for_chunks(blocks, BlockP16::per_row(n), |i, blocks| ctx.arch.quantize_p16(row(i), blocks));
            Prepared::Acts(Acts::P16 { x: blocks, n })
        }
        Path::Matvec(ActForm::Q8) => {
            let blocks = blocks(room, m * BlockQ8::per_row(n));
            workers.for_chunks(blocks, BlockQ8::per_row(n), |i, blocks| ctx.arch.quantize_q8(row(i), blocks));
            Prepared::Acts(Acts::Q8 { x: blocks, n })
        }
        Path::Gemm => {
            let packed = &mut room[..ctx.arch.packed_len(dtype, m, n)];
            let group = ctx.arch.pack_group(dtype);
            ctx.crew.for_chunks(packed, ctx.arch.packed_len(dtype, group, n), |i, packed| {
                let rows = group.min(m - i * group);
                ctx.arch.pack(dtype, &x[i * group * n..][..rows * n], rows, n, packed);
            });
            Prepared::Packed { packed, n }
        }
    }
}

/// The output rows `rows` of a product, with its bias and what adapters add.
fn multiply(ctx: Ctx<'_>, x: &Prepared<'_>, low: &[f32], p: &Product<'_>, rows: Range<usize>, y: &mut ColumnsMut<'_>) {
    let row = p.w.row_bytes();
    x.multiply(ctx.arch, p.w.dtype, &p.w.data(ctx.gguf)[rows.start * row..rows.end * row], y);
    if let Some(b) = p.b {
        for i in 0..y.rows() {
            ctx.arch.add(y.row(i), &b[rows.clone()]);
        }
    }
    let mut low = &low[p.low..];
    for (term, _) in ctx.adapters.iter().filter_map(|a| a.term(p.w.site)) {
        let rank = term.rank();
        let (t, rest) = low.split_at(y.rows() * rank);
        ctx.arch.add_product(y, t, &term.b()[p.w.first_row + rows.start..], term.b().len() / rank);
        low = rest;
    }
}

/// Room for the backward pass of products of up to `m` rows.
pub(crate) struct ScratchBackward<'a> {
    packed: &'a mut [u8],
    /// `dx` of all products but the first, `(m, n_in)`.
    dx: &'a mut [f32],
    /// `dy·B` and `A·x` of one adapter, `(m, rank)` each, and their transposes.
    low: [&'a mut [f32]; 4],
}

impl<'a> ScratchBackward<'a> {
    /// `outputs` are the formats of the weights, the rows and the widths of the gradients that products are
    /// given, `n_in` is the largest width of an input that several products share.
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        arch: Arch,
        m: usize,
        n_in: usize,
        outputs: impl IntoIterator<Item = (DType, usize, usize)>,
        rank: usize,
    ) -> ScratchBackward<'a> {
        let packed = outputs.into_iter().map(|(dtype, m, n_out)| arch.transposed(dtype, n_out, 1).packed_len(m));
        ScratchBackward {
            packed: frame.take(packed.max().unwrap_or(0)),
            dx: frame.take(m * n_in),
            low: [(); 4].map(|()| frame.take(m * rank)),
        }
    }
}

/// Of which of the attached adapters gradients are wanted, and those so far.
pub(crate) struct Wanted<'a> {
    pub(crate) adapter: usize,
    pub(crate) gradients: &'a mut Gradients,
}

/// The backward pass of [`linear`]: adds the gradients of the wanted adapter's terms in `products` of
/// `x`, given the gradients `dy` by their results, and sets `dx` to that by `x`.
pub(crate) fn linear_backward(
    ctx: Ctx<'_>,
    scratch: &mut ScratchBackward<'_>,
    wanted: &mut Wanted<'_>,
    x: &[f32],
    m: usize,
    products: &[(&Weight, &[f32])],
    mut dx: Option<&mut [f32]>,
) {
    for (i, &(w, dy)) in products.iter().enumerate() {
        assert!(x.len() == m * w.n_in && dy.len() == m * w.n_out, "linear_backward: {m} rows");
        match &mut dx {
            Some(dx) if i == 0 => transposed(ctx, scratch.packed, w, dy, m, dx),
            Some(dx) => {
                let more = &mut scratch.dx[..m * w.n_in];
                transposed(ctx, scratch.packed, w, dy, m, more);
                ctx.crew.for_chunks(dx, w.n_in, |i, dx| ctx.arch.add(dx, &more[i * w.n_in..][..w.n_in]));
            }
            None => {}
        }
        for (j, attached) in ctx.adapters.iter().enumerate() {
            low_rank_backward(ctx, &mut scratch.low, wanted, j, attached, x, m, (w, dy), dx.as_deref_mut());
        }
    }
}

/// `dx = Wᵀ·dy`.
fn transposed(ctx: Ctx<'_>, packed: &mut [u8], w: &Weight, dy: &[f32], m: usize, dx: &mut [f32]) {
    let product = ctx.arch.transposed(w.dtype, w.n_out, w.n_in);
    let packed = &mut packed[..product.packed_len(m)];
    let group = product.group();
    ctx.crew.for_chunks(packed, product.packed_len(group), |i, packed| {
        let rows = group.min(m - i * group);
        product.pack(&dy[i * group * w.n_out..][..rows * w.n_out], rows, packed);
    });
    let (packed, data) = (&*packed, w.data(ctx.gguf));
    ctx.crew.for_tiles(
        &mut [ColumnsMut::new(dx, m, w.n_in)],
        |dx| (dx, product.tile()),
        |_, columns, dx| product.multiply(dx, columns.start, data, packed),
    );
}

/// The backward pass of `y += s·B·A·x`, of adapter `j`: `dB += s·dy·(A·x)ᵀ`, `dA += s·(Bᵀ·dy)·xᵀ`,
/// `dx += s·Aᵀ·(Bᵀ·dy)`.
fn low_rank_backward(
    ctx: Ctx<'_>,
    low: &mut [&mut [f32]; 4],
    wanted: &mut Wanted<'_>,
    j: usize,
    attached: &Attached,
    x: &[f32],
    m: usize,
    (w, dy): (&Weight, &[f32]),
    dx: Option<&mut [f32]>,
) {
    let Some(term) = attached.adapter.term(w.site) else { return };
    let gradient = if j == wanted.adapter { wanted.gradients.term_mut(w.site) } else { None };
    // A term that is zero changes nothing, but can have a gradient.
    let dx = dx.filter(|_| attached.term(w.site).is_some());
    if gradient.is_none() && dx.is_none() {
        return;
    }
    let (arch, crew) = (ctx.arch, ctx.crew.when(m > 1));
    let (rank, factor) = (term.rank(), attached.scale * attached.adapter.scale(term));
    let n_rows = term.b().len() / rank;
    let [by_token, x_by_token, by_rank, x_by_rank] = low.each_mut().map(|low| &mut low[..m * rank]);
    crew.for_chunks(by_token, LOW_ROWS * rank, |i, t| {
        for (t, dy) in t.chunks_exact_mut(rank).zip(dy[i * LOW_ROWS * w.n_out..].chunks_exact(w.n_out)) {
            for (t, b) in t.iter_mut().zip(term.b().chunks_exact(n_rows)) {
                *t = factor * arch.dot(dy, &b[w.first_row..][..w.n_out]);
            }
        }
    });
    if let Some(gradient) = gradient {
        crew.for_chunks(x_by_token, LOW_ROWS * rank, |i, u| {
            for (u, x) in u.chunks_exact_mut(rank).zip(x[i * LOW_ROWS * w.n_in..].chunks_exact(w.n_in)) {
                for (u, a) in u.iter_mut().zip(term.a().chunks_exact(w.n_in)) {
                    *u = factor * arch.dot(x, a);
                }
            }
        });
        for (from, to) in [(&*by_token, &mut *by_rank), (&*x_by_token, &mut *x_by_rank)] {
            for (r, to) in to.chunks_exact_mut(m).enumerate() {
                to.iter_mut().zip(from.chunks_exact(rank)).for_each(|(to, from)| *to = from[r]);
            }
        }
        let (da, db) = gradient.parts_mut();
        let (by_rank, x_by_rank) = (&*by_rank, &*x_by_rank);
        // Columns of `dA` and `dB`, and where those of `x` and `dy` begin among them.
        let mut sums = [
            (ColumnsMut::new(da, rank, w.n_in), x, w.n_in, 0, by_rank),
            (ColumnsMut::new(db, rank, n_rows), dy, w.n_out, w.first_row, x_by_rank),
        ];
        crew.for_tiles(
            &mut sums,
            |(d, ..)| (d, LOW_COLUMNS),
            |&(_, rows, n, first, t), columns, d| {
                let (start, end) = (columns.start.max(first), columns.end.min(first + n));
                if start < end {
                    for (r, t) in t.chunks_exact(m).enumerate() {
                        let d = &mut d.row(r)[start - columns.start..end - columns.start];
                        arch.add_weighted(d, &rows[start - first..], n, t);
                    }
                }
            },
        );
    }
    if let Some(dx) = dx {
        let by_token = &*by_token;
        crew.for_chunks(dx, w.n_in, |i, dx| arch.add_weighted(dx, term.a(), w.n_in, &by_token[i * rank..][..rank]));
    }
}
