//! The only place where a weight is multiplied.
//!
//! There are two arithmetics, one for rows of generated tokens and one for rows of prompts, and
//! neither depends on the number of rows: generated rows are multiplied by [`Arch::matvec`], prompt
//! rows by [`Arch::gemm`], even a single one. If a pass has both, a task multiplies the same weight
//! rows by both kinds, so that weights are read from memory once; where [`Arch::both`] can, they
//! are unpacked once, too.

use crate::arch::{ActForm, Acts, Arch, BlockP16, BlockQ16, CacheLine, ColumnsMut};
use crate::clock::Timer;
use crate::compute::arena::Frame;
use crate::compute::probe::ProductCallback;
use crate::compute::tiles::Tiles;
use crate::compute::weight::{Linear, Weight};
use crate::gguf::Gguf;
use crate::lora::{Attached, Factor, Gradients};
use crate::quant::DType;
use crate::threads::{PoolHandle, Tiled, n_tiles};
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering};

/// Weight bytes of one [`Arch::matvec`] task. Kernels prefetch some kilobytes ahead, which is
/// wasted at the end of a task, so larger tasks waste less (from 48 to 768 KiB decoding gained a
/// tenth to a quarter).
const TASK_BYTES: std::ops::RangeInclusive<usize> = 48 << 10..=2 << 20;
/// Tasks of a product per thread, within [`TASK_BYTES`], and of a region of tiles, at least: enough
/// that all threads end at about the same time.
const TASKS_PER_THREAD: usize = 4;
/// Rows per task are a multiple of this, the largest number that kernels take at a time.
const TASK_ROWS: usize = 16;
/// Rows per task of [`Arch::gemm`] are a multiple of this, the height of its panels.
const PANEL_ROWS: usize = 32;
/// Activation rows that one task multiplies by the `A` of an adapter.
const LOW_ROWS: usize = 16;
/// Columns of an adapter's gradient that one task adds to: few enough that its inputs for 512
/// tokens stay in the L2 cache from one row of the adapter to the next.
const LOW_COLUMNS: usize = 128;
/// Number of activations from which rounding is shared among threads: some microseconds of work.
const SHARED_VALUES: usize = 16 << 10;
/// Largest number of products of all rows in one call of [`linear`].
const MAX_PRODUCTS: usize = 3;
/// Largest number of experts with products of a single row in one call of [`linear`].
pub(crate) const MAX_EXPERTS: usize = 8;

/// Context of products, besides their operands.
#[derive(Clone, Copy)]
pub(crate) struct Ctx<'a> {
    pub(crate) arch: Arch,
    pub(crate) threads: &'a PoolHandle<'a>,
    pub(crate) gguf: &'a Gguf,
    pub(crate) adapters: RowAdapters<'a>,
    /// Number of rows, the first ones, that are multiplied as generated tokens are; the others as
    /// prompts.
    pub(crate) n_generated: usize,
    /// Counter of the nanoseconds that products with adapters took, divided by the number of
    /// threads.
    pub(crate) adapter_nanos: Option<&'a AtomicU64>,
    /// Sees the inputs of products.
    pub(crate) products: Option<&'a dyn ProductCallback>,
}

impl<'a> Ctx<'a> {
    /// Of products without adapters that nobody watches; the first `n_generated` rows are those of
    /// generated tokens.
    pub(crate) fn without_adapters(
        arch: Arch,
        threads: &'a PoolHandle<'a>,
        gguf: &'a Gguf,
        n_generated: usize,
    ) -> Ctx<'a> {
        Ctx {
            arch,
            threads,
            gguf,
            adapters: RowAdapters::All(&[]),
            n_generated,
            adapter_nanos: None,
            products: None,
        }
    }
}

/// The adapters of each row of a product.
#[derive(Clone, Copy)]
pub(crate) enum RowAdapters<'a> {
    /// All rows have these adapters.
    All(&'a [Attached]),
    /// The rows of a slot have its own; those of slot `i` end at row `ends[i]`.
    Slots {
        slots: &'a dyn SlotAdapters,
        ends: &'a [u32],
    },
}

/// Adapters by slot.
pub(crate) trait SlotAdapters: Sync {
    fn of(&self, slot: usize) -> &[Attached];
}

impl<'a> RowAdapters<'a> {
    fn is_empty(self) -> bool {
        matches!(self, RowAdapters::All([]))
    }

    /// Runs of rows with the same adapters, of `m` rows.
    fn runs(self, m: usize) -> impl Iterator<Item = (Range<usize>, &'a [Attached])> {
        let n_runs = if let RowAdapters::Slots { ends, .. } = self {
            ends.len()
        } else {
            1
        };
        (0..n_runs).map(move |i| match self {
            RowAdapters::All(adapters) => (0..m, adapters),
            RowAdapters::Slots { slots, ends } => {
                let start = i.checked_sub(1).map_or(0, |before| ends[before] as usize);
                (start..ends[i] as usize, slots.of(i))
            }
        })
    }
}

/// One product: `y = W·x (+ b)` plus the adapters' terms; `y` is `(m, n_out)`.
pub(crate) type Product<'a> = Tiled<'a, Factors<'a>>;

/// Factors of a [`Product`], besides the activations.
pub(crate) struct Factors<'a> {
    w: &'a Weight,
    b: Option<&'a [f32]>,
    /// First row of `x` that it reads; it reads as many rows as the output has.
    row: usize,
    /// Offset of its adapters' `s·A·x` in [`Scratch::low`].
    low: usize,
}

impl<'a> Product<'a> {
    pub(crate) fn of(linear: &'a Linear, y: &'a mut [f32], m: usize) -> Product<'a> {
        let mut product = Product::of_weight(&linear.w, y, m);
        product.item.b = linear.b.as_deref();
        product
    }

    pub(crate) fn of_weight(w: &'a Weight, y: &'a mut [f32], m: usize) -> Product<'a> {
        let item = Factors {
            w,
            b: None,
            row: 0,
            low: 0,
        };
        Product {
            y: ColumnsMut::new(y, m, w.n_out),
            width: w.n_out,
            item,
        }
    }

    /// A product of row `row` alone; of none if `y` is empty.
    pub(crate) fn of_row(linear: &'a Linear, y: &'a mut [f32], row: usize) -> Product<'a> {
        let mut product = Product::of(linear, y, usize::from(!y.is_empty()));
        product.item.row = row;
        product
    }
}

/// Sizes on which the memory of products depends.
#[derive(Clone, Copy)]
pub(crate) struct ProductSizes<'a> {
    pub(crate) arch: Arch,
    /// Every combination of format and row length among the matrices.
    pub(crate) shapes: &'a [(DType, usize)],
    pub(crate) n_threads: usize,
    /// Most experts of a token whose products are computed together.
    pub(crate) n_single: usize,
}

/// Room for activations of up to `m` rows in the forms that products read.
pub(crate) struct Scratch<'a> {
    prepared: &'a mut [u8],
    /// `s·A·x` of every product and adapter, each `(m, rank)`.
    low: &'a mut [f32],
    /// Workspace of the threads for [`Arch::gemm`].
    workspace: &'a mut [CacheLine],
}

impl<'a> Scratch<'a> {
    /// For products of up to `n_generated` rows of generated tokens and `n_prompt` of prompts with
    /// any matrix of the model; `rank` is that of all adapters together.
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        sizes: ProductSizes<'_>,
        (n_generated, n_prompt): (usize, usize),
        rank: usize,
    ) -> Scratch<'a> {
        let ProductSizes {
            arch,
            shapes,
            n_threads,
            n_single: m_single,
        } = sizes;
        let rows = (n_generated.max(m_single), n_prompt);
        let prepared = shapes
            .iter()
            .map(|&(dtype, n)| prepared_len(arch, dtype, rows, n))
            .max();
        let by_panels = shapes.iter().filter(|_| n_prompt > 0);
        let workspace = by_panels
            .map(|&(dtype, _)| arch.gemm_workspace(dtype))
            .max();
        let low = (MAX_PRODUCTS * (n_generated + n_prompt)).max(2 * m_single) * rank;
        Scratch {
            prepared: frame.take(prepared.unwrap_or(0)),
            low: frame.take(low),
            workspace: frame.take(n_threads * workspace.unwrap_or(0)),
        }
    }
}

/// Bytes of rows of `n` values in the forms that products with weights of `dtype` read.
fn prepared_len(
    arch: Arch,
    dtype: DType,
    (n_generated, n_prompt): (usize, usize),
    n: usize,
) -> usize {
    rounded_len(arch, dtype, n_generated, n) + arch.packed_len(dtype, n_prompt, n)
}

/// Bytes of `m` rows of generated tokens, a multiple of a cache line.
fn rounded_len(arch: Arch, dtype: DType, m: usize, n: usize) -> usize {
    const _: () = assert!(
        size_of::<BlockP16>().is_multiple_of(64) && size_of::<BlockQ16>().is_multiple_of(64)
    );
    match arch.act_form(dtype) {
        ActForm::F32 => 0,
        ActForm::Q16 => m * BlockQ16::per_row(n) * size_of::<BlockQ16>(),
        ActForm::P16 => m * BlockP16::per_row(n) * size_of::<BlockP16>(),
    }
}

/// Activations as the kernels of some products read them: rows of generated tokens, then rows of
/// prompts.
struct Prepared<'a> {
    generated: Acts<'a>,
    /// `n_prompt` rows of `n` values.
    packed: &'a [u8],
    n_prompt: usize,
    n: usize,
}

impl Prepared<'_> {
    /// Rows of `w` per task. A row's result does not depend on it.
    fn task_rows(&self, ctx: Ctx<'_>, w: &Weight) -> usize {
        let share = w.n_out / (ctx.threads.n_threads() * TASKS_PER_THREAD);
        // Where rows of both kinds are multiplied one after the other, the second reads the weights
        // from the cache.
        let at_once =
            ctx.n_generated == 0 || ctx.arch.has_both(w.dtype, ctx.n_generated, self.n_prompt);
        let few = if at_once {
            ctx.arch.gemm_few(w.dtype)
        } else {
            0
        };
        if self.n_prompt > few {
            return share
                .next_multiple_of(PANEL_ROWS)
                .clamp(PANEL_ROWS, ctx.arch.gemm_tile(w.dtype));
        }
        let bytes = (share * w.row_bytes()).clamp(*TASK_BYTES.start(), *TASK_BYTES.end());
        (bytes / w.row_bytes())
            .next_multiple_of(TASK_ROWS)
            .max(TASK_ROWS)
    }

    /// Multiplies all rows, or row `row` if `y` has one.
    fn multiply(
        &self,
        arch: Arch,
        dtype: DType,
        w: &[u8],
        row: usize,
        y: &mut ColumnsMut<'_>,
        workspace: &mut [CacheLine],
    ) {
        let n_generated = y.rows() - self.n_prompt;
        if arch.has_both(dtype, n_generated, self.n_prompt) {
            let generated = self.generated.rows(row, n_generated);
            return arch.both(dtype, y, w, &generated, self.packed, self.n);
        }
        if n_generated > 0 {
            arch.matvec(
                dtype,
                &mut y.rows_mut(0..n_generated),
                w,
                &self.generated.rows(row, n_generated),
            );
        }
        if self.n_prompt > 0 {
            arch.gemm(
                dtype,
                &mut y.rows_mut(n_generated..y.rows()),
                w,
                self.packed,
                self.n,
                workspace,
            );
        }
    }
}

/// Computes all `products` of the same activations `x` (`m` rows), in as few parallel regions as
/// their forms allow. A product reads all rows or, of generated tokens, a single one.
pub(crate) fn linear(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    x: &[f32],
    m: usize,
    products: &mut [Product<'_>],
) {
    linear_tiles(ctx, scratch, x, m, products, &mut Tiles::at_once());
}

/// [`linear`] tile by tile. If it pauses, what it left in `scratch` has to be there when it goes
/// on.
fn linear_tiles(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    x: &[f32],
    m: usize,
    products: &mut [Product<'_>],
    tiles: &mut Tiles<'_>,
) {
    assert!(
        products.iter().all(|p| x.len() == m * p.item.w.n_in),
        "linear: {m} rows in {} values",
        x.len()
    );
    assert!(
        ctx.n_generated == m || products.iter().all(|p| p.y.rows() == m),
        "linear: some of {m} rows"
    );
    let Scratch {
        prepared,
        low,
        workspace,
    } = scratch;
    if let Some(probe) = ctx.products.filter(|_| tiles.n_done() == 0) {
        show_inputs(probe, ctx.gguf, x, products);
    }
    timed(ctx, 1, || project(ctx, low, x, products));
    let mut rest = products;
    while let Some((first, _)) = rest.split_first() {
        // Products that read the same form of `x` share one region.
        let (arch, w) = (ctx.arch, first.item.w);
        let alike = |p: &Product<'_>| {
            let dtype = p.item.w.dtype;
            (ctx.n_generated == 0 || arch.act_form(dtype) == arch.act_form(w.dtype))
                && (ctx.n_generated == m || arch.same_packing(dtype, w.dtype))
        };
        let n = rest.iter().take_while(|p| alike(p)).count();
        let (group, tail) = rest.split_at_mut(n);
        rest = tail;
        let x = prepare(ctx, prepared, x, m, w, tiles.is_new());
        for p in &mut *group {
            p.width = x.task_rows(ctx, p.item.w);
        }
        let least = ctx.threads.n_threads() * TASKS_PER_THREAD;
        tiles.each(n_tiles(group), least, |tiles| {
            ctx.threads
                .for_some_tiles(tiles, group, workspace, |p, rows, y, workspace| {
                    multiply(ctx, &x, low, p, rows, y, workspace);
                });
        });
        if tiles.is_paused() {
            return;
        }
    }
}

/// Products of some rows of a pass: their context, and the room that they take.
pub(crate) struct RowCtx<'a, 'b> {
    pub(crate) ctx: Ctx<'a>,
    pub(crate) scratch: &'a mut Scratch<'b>,
}

impl<'a> Deref for RowCtx<'a, '_> {
    type Target = Ctx<'a>;

    fn deref(&self) -> &Ctx<'a> {
        &self.ctx
    }
}

impl<'b> RowCtx<'_, 'b> {
    /// See [`linear`].
    pub(crate) fn linear(&mut self, x: &[f32], m: usize, products: &mut [Product<'_>]) {
        linear(self.ctx, self.scratch, x, m, products);
    }

    /// See [`linear_tiles`].
    pub(crate) fn linear_tiles(
        &mut self,
        x: &[f32],
        m: usize,
        products: &mut [Product<'_>],
        tiles: &mut Tiles<'_>,
    ) {
        linear_tiles(self.ctx, self.scratch, x, m, products, tiles);
    }

    /// For `n_generated` rows of generated tokens instead.
    pub(crate) fn generated(&mut self, n_generated: usize) -> RowCtx<'_, 'b> {
        let ctx = Ctx {
            n_generated,
            ..self.ctx
        };
        RowCtx {
            ctx,
            scratch: self.scratch,
        }
    }
}

/// Shows the inputs of products; those of parts of one matrix once.
fn show_inputs(probe: &dyn ProductCallback, gguf: &Gguf, x: &[f32], products: &[Product<'_>]) {
    for (i, p) in products.iter().enumerate() {
        let Factors { w, row, .. } = p.item;
        let matrix = w.place_in_stack(gguf);
        let same = |b: &Product<'_>| (b.item.w.place_in_stack(gguf), b.item.row) == (matrix, row);
        if !products[..i].iter().any(same) {
            let (tensor, matrix) = matrix;
            let x = &x[row * w.n_in..][..p.y.rows() * w.n_in];
            probe.inputs(&gguf.tensors()[tensor].name, matrix, w.n_in, x);
        }
    }
}

/// Runs `f`, which computes adapters' terms on `n` threads, and counts its time.
fn timed(ctx: Ctx<'_>, n: usize, f: impl FnOnce()) {
    let Some(nanos) = ctx.adapter_nanos.filter(|_| !ctx.adapters.is_empty()) else {
        return f();
    };
    let timer = Timer::start();
    f();
    let taken = u64::try_from(timer.elapsed().as_nanos()).unwrap_or(u64::MAX);
    nanos.fetch_add(taken / n as u64, Ordering::Relaxed);
}

/// Computes `s·A·x` of every product and adapter in `low`.
fn project(ctx: Ctx<'_>, low: &mut [f32], x: &[f32], products: &mut [Product<'_>]) {
    let mut end = 0;
    for i in 0..products.len() {
        let (before, rest) = products.split_at_mut(i);
        let n_rows = rest[0].y.rows();
        let p = &mut rest[0].item;
        // Parts of one matrix share their `A`.
        if let Some(same) = before
            .iter()
            .find(|b| (b.item.w.site, b.item.row) == (p.w.site, p.row))
        {
            p.low = same.item.low;
            continue;
        }
        p.low = end;
        for (rows, adapters) in ctx.adapters.runs(n_rows) {
            for (term, factor) in adapters.iter().filter_map(|a| a.term(p.w.site)) {
                let (n, rank, m) = (p.w.n_in, term.rank(), rows.len());
                let x = &x[(p.row + rows.start) * n..][..m * n];
                let t = &mut low[end..end + m * rank];
                end += m * rank;
                low_rank(
                    ctx.arch,
                    &ctx.threads.when(m > 1),
                    factor,
                    t,
                    x,
                    (term.factors().0, n, 0, n),
                );
            }
        }
    }
}

/// The `m` rows of `x` in the forms that products with `w` and weights of its type read; unless
/// they are new, they are in `room`.
fn prepare<'a>(
    ctx: Ctx<'_>,
    room: &'a mut [u8],
    x: &'a [f32],
    m: usize,
    w: &Weight,
    is_new: bool,
) -> Prepared<'a> {
    let (n, dtype, n_prompt) = (w.n_in, w.dtype, m - ctx.n_generated);
    let (generated, prompt) = x.split_at(ctx.n_generated * n);
    let (rounded, room) = room.split_at_mut(rounded_len(ctx.arch, dtype, ctx.n_generated, n));
    let workers = ctx
        .threads
        .when(ctx.n_generated > 1 && generated.len() >= SHARED_VALUES);
    let row = |i: usize| &generated[i * n..][..n];
    let generated = match ctx.arch.act_form(dtype) {
        ActForm::F32 => Acts::F32 { x: generated, n },
        ActForm::Q16 => {
            let blocks = bytemuck::cast_slice_mut(rounded);
            if is_new {
                workers.for_chunks(blocks, BlockQ16::per_row(n), |i, blocks| {
                    ctx.arch.quantize_q16(row(i), blocks)
                });
            }
            Acts::Q16 { x: blocks, n }
        }
        ActForm::P16 => {
            let blocks = bytemuck::cast_slice_mut(rounded);
            if is_new {
                workers.for_chunks(blocks, BlockP16::per_row(n), |i, blocks| {
                    ctx.arch.quantize_p16(row(i), blocks)
                });
            }
            Acts::P16 { x: blocks, n }
        }
    };
    let packed = &mut room[..ctx.arch.packed_len(dtype, n_prompt, n)];
    if n_prompt > 0 && is_new {
        let group = ctx.arch.pack_group(dtype);
        ctx.threads
            .for_chunks(packed, ctx.arch.packed_len(dtype, group, n), |i, packed| {
                let rows = group.min(n_prompt - i * group);
                ctx.arch.pack(
                    dtype,
                    &prompt[i * group * n..][..rows * n],
                    n_prompt,
                    n,
                    packed,
                );
            });
    }
    Prepared {
        generated,
        packed,
        n_prompt,
        n,
    }
}

/// Computes the output rows `rows` of a product, with its bias and the adapters' terms.
fn multiply(
    ctx: Ctx<'_>,
    x: &Prepared<'_>,
    low: &[f32],
    p: &Factors<'_>,
    rows: Range<usize>,
    y: &mut ColumnsMut<'_>,
    workspace: &mut [CacheLine],
) {
    x.multiply(
        ctx.arch,
        p.w.dtype,
        p.w.data_of_rows(ctx.gguf, rows.clone()),
        p.row,
        y,
        workspace,
    );
    scale(y, p.w.scale);
    if let Some(b) = p.b {
        for i in 0..y.rows() {
            ctx.arch.add(y.row(i), &b[rows.clone()]);
        }
    }
    let mut low = &low[p.low..];
    timed(ctx, ctx.threads.n_threads(), || {
        for (of_run, adapters) in ctx.adapters.runs(y.rows()) {
            for (term, _) in adapters.iter().filter_map(|a| a.term(p.w.site)) {
                let rank = term.rank();
                let (t, rest) = low.split_at(of_run.len() * rank);
                let (y, b, first) = (
                    &mut y.rows_mut(of_run.clone()),
                    term.factors().1,
                    p.w.first_row + rows.start,
                );
                match b {
                    Factor::F32(b) => ctx.arch.add_product(y, t, &b[first..], b.len() / rank),
                    Factor::F16(b, _) => {
                        ctx.arch.add_product_f16(y, t, &b[first..], b.len() / rank)
                    }
                }
                low = rest;
            }
        }
    });
}

fn scale(y: &mut ColumnsMut<'_>, factor: f32) {
    if factor != 1.0 {
        for i in 0..y.rows() {
            y.row(i).iter_mut().for_each(|y| *y *= factor);
        }
    }
}

/// Memory for the backward pass of products of up to `m` rows.
pub(crate) struct ScratchBackward<'a> {
    packed: &'a mut [u8],
    /// `dx` of all products but the first, `(m, n_in)`.
    dx: &'a mut [f32],
    /// `dy·B` and `A·x` of one adapter, `(m, rank)` each, and their transposes.
    low: [&'a mut [f32]; 4],
    /// Workspace of the threads for
    /// [`TransposedProduct::multiply`](crate::arch::TransposedProduct::multiply).
    workspace: &'a mut [CacheLine],
}

impl<'a> ScratchBackward<'a> {
    /// `outputs` are the weights' formats, the rows and the widths of the output gradients of the
    /// products; `n_in` is the largest width of an input that several products share.
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        arch: Arch,
        n_threads: usize,
        m: usize,
        n_in: usize,
        outputs: impl IntoIterator<Item = (DType, usize, usize)>,
        rank: usize,
    ) -> ScratchBackward<'a> {
        let (mut packed, mut workspace) = (0, 0);
        for (dtype, m, n_out) in outputs {
            let product = arch.transposed(dtype, n_out, 1);
            packed = packed.max(product.packed_len(m));
            workspace = workspace.max(product.workspace());
        }
        ScratchBackward {
            packed: frame.take(packed),
            dx: frame.take(m * n_in),
            low: [(); 4].map(|()| frame.take(m * rank)),
            workspace: frame.take(n_threads * workspace),
        }
    }
}

/// The gradients of one attached adapter, accumulated so far.
pub(crate) struct Wanted<'a> {
    pub(crate) adapters: &'a [Attached],
    /// Index of that adapter.
    pub(crate) adapter: usize,
    pub(crate) gradients: &'a mut Gradients,
}

/// The backward pass of [`linear`]: adds the gradients of the wanted adapter's terms in `products`
/// of `x`, given the gradients `dy` of their results, and sets `dx` to that of `x`.
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
        assert!(
            x.len() == m * w.n_in && dy.len() == m * w.n_out,
            "linear_backward: {m} rows"
        );
        match &mut dx {
            Some(dx) if i == 0 => transposed(ctx, scratch.packed, scratch.workspace, w, dy, m, dx),
            Some(dx) => {
                let more = &mut scratch.dx[..m * w.n_in];
                transposed(ctx, scratch.packed, scratch.workspace, w, dy, m, more);
                ctx.threads.for_chunks(dx, w.n_in, |i, dx| {
                    ctx.arch.add(dx, &more[i * w.n_in..][..w.n_in])
                });
            }
            None => {}
        }
        for (j, attached) in wanted.adapters.iter().enumerate() {
            low_rank_backward(
                ctx,
                &mut scratch.low,
                wanted,
                j,
                attached,
                x,
                m,
                (w, dy),
                dx.as_deref_mut(),
            );
        }
    }
}

/// `dx = Wᵀ·dy`.
pub(crate) fn transposed(
    ctx: Ctx<'_>,
    packed: &mut [u8],
    workspace: &mut [CacheLine],
    w: &Weight,
    dy: &[f32],
    m: usize,
    dx: &mut [f32],
) {
    let product = ctx.arch.transposed(w.dtype, w.n_out, w.n_in);
    let packed = &mut packed[..product.packed_len(m)];
    let group = product.group();
    ctx.threads
        .for_chunks(packed, product.packed_len(group), |i, packed| {
            let rows = group.min(m - i * group);
            product.pack(&dy[i * group * w.n_out..][..rows * w.n_out], rows, packed);
        });
    let (packed, data) = (&*packed, w.data(ctx.gguf));
    let mut dx = [Tiled {
        y: ColumnsMut::new(dx, m, w.n_in),
        width: product.tile(),
        item: (),
    }];
    ctx.threads
        .for_tiles(&mut dx, workspace, |(), columns, dx, workspace| {
            product.multiply(dx, columns.start, data, packed, workspace);
            scale(dx, w.scale);
        });
}

/// The backward pass of `y += s·B·A·x` for adapter `j`: `dB += s·dy·(A·x)ᵀ`, `dA += s·(Bᵀ·dy)·xᵀ`,
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
    let Some(term) = attached.adapter.term(w.site) else {
        return;
    };
    let gradient = if j == wanted.adapter {
        wanted.gradients.term_mut(w.site)
    } else {
        None
    };
    // A term that is zero changes nothing, but can have a gradient.
    let dx = dx.filter(|_| attached.term(w.site).is_some());
    if gradient.is_none() && dx.is_none() {
        return;
    }
    let (arch, threads) = (ctx.arch, ctx.threads.when(m > 1));
    let (rank, factor) = (term.rank(), attached.scale * attached.adapter.scale(term));
    let (a, b) = term.factors();
    let n_rows = b.len() / rank;
    let [by_token, x_by_token, by_rank, x_by_rank] = low.each_mut().map(|low| &mut low[..m * rank]);
    let (of_b, of_a) = ((b, n_rows, w.first_row, w.n_out), (a, w.n_in, 0, w.n_in));
    low_rank(arch, &threads, factor, by_token, dy, of_b);
    if let Some(gradient) = gradient {
        low_rank(arch, &threads, factor, x_by_token, x, of_a);
        for (from, to) in [(&*by_token, &mut *by_rank), (&*x_by_token, &mut *x_by_rank)] {
            for (r, to) in to.chunks_exact_mut(m).enumerate() {
                to.iter_mut()
                    .zip(from.chunks_exact(rank))
                    .for_each(|(to, from)| *to = from[r]);
            }
        }
        let (da, db) = gradient.parts_mut();
        let (by_rank, x_by_rank) = (&*by_rank, &*x_by_rank);
        // Columns of `dA` and `dB`, and where those of `x` and `dy` begin among them.
        let sums = |d, cols, item| Tiled {
            y: ColumnsMut::new(d, rank, cols),
            width: LOW_COLUMNS,
            item,
        };
        let mut sums = [
            sums(da, w.n_in, (x, w.n_in, 0, by_rank)),
            sums(db, n_rows, (dy, w.n_out, w.first_row, x_by_rank)),
        ];
        threads.for_tiles(
            &mut sums,
            &mut [(); 0],
            |&(rows, n, first, t), columns, d, _| {
                let (start, end) = (columns.start.max(first), columns.end.min(first + n));
                if start < end {
                    let d = &mut d.columns_mut(start - columns.start..end - columns.start);
                    arch.add_product(d, t, &rows[start - first..], n);
                }
            },
        );
    }
    if let Some(dx) = dx {
        let by_token = &*by_token;
        threads.for_chunks(dx, LOW_ROWS * w.n_in, |i, dx| {
            let m = dx.len() / w.n_in;
            let t = &by_token[i * LOW_ROWS * rank..][..m * rank];
            arch.add_product(&mut ColumnsMut::new(dx, m, w.n_in), t, term.a(), w.n_in);
        });
    }
}

/// `t = factor·x·Wᵀ`, where `t` is `(m, rank)`; of the `rank` rows of `W`, which lie `stride`
/// apart, `n` values from `first` on.
fn low_rank(
    arch: Arch,
    threads: &PoolHandle<'_>,
    factor: f32,
    t: &mut [f32],
    x: &[f32],
    (w, stride, first, n): (&Factor, usize, usize, usize),
) {
    let (dtype, w) = w.data();
    let row = dtype.float_format().bytes_of(1, stride).expect("floats");
    let (rank, part) = (
        w.len() / row,
        first * row / stride..(first + n) * row / stride,
    );
    threads.for_chunks(t, LOW_ROWS * rank, |i, t| {
        let rows = t.len() / rank;
        let x = Acts::F32 {
            x: &x[i * LOW_ROWS * n..][..rows * n],
            n,
        };
        let mut y = ColumnsMut::new(t, rows, rank);
        if stride == n {
            arch.matvec(dtype, &mut y, w, &x);
        } else {
            for (r, w) in w.chunks_exact(row).enumerate() {
                arch.matvec(dtype, &mut y.columns_mut(r..r + 1), &w[part.clone()], &x);
            }
        }
        t.iter_mut().for_each(|t| *t *= factor);
    });
}
