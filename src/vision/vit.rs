//! The encoder: layers of attention and feed-forward over the patches of an image.

use crate::arch::Arch;
use crate::compute::arena::{Arena, Frame, counted};
use crate::compute::linear::{Ctx, Product, ProductSizes, Scratch, linear};
use crate::compute::weight::Linear;
use crate::gguf::Gguf;
use crate::quant::DType;
use crate::threads::PoolHandle;
use crate::vision::VisionError;
use crate::vision::attention::{AttentionBuffers, Heads};
use crate::vision::file::Norm;
use crate::vision::grid::Grid;
use crate::vision::ops::{Act, Op, OpBuffers, Shape, apply_norm, most_values, result};
use crate::vision::positions::{Positions, RopeSpec};
use crate::vision::preprocess::Pixels;
use std::ops::Range;

/// Place of the class token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClassPlace {
    First,
    Last,
}

/// The class token, with its position already added.
#[derive(Clone, Debug)]
pub(super) struct Class {
    pub(super) place: ClassPlace,
    pub(super) values: Vec<f32>,
}

/// A layer.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) norm1: Norm,
    pub(super) qkv: [Linear; 3],
    pub(super) q_norm: Option<Norm>,
    pub(super) k_norm: Option<Norm>,
    /// Norm of values per head.
    pub(super) v_norm: Option<Norm>,
    pub(super) out: Linear,
    pub(super) post_attention: Option<Norm>,
    pub(super) scale1: Option<Vec<f32>>,
    pub(super) norm2: Norm,
    pub(super) gate: Option<Linear>,
    pub(super) up: Linear,
    pub(super) down: Linear,
    pub(super) post_ffn: Option<Norm>,
    pub(super) scale2: Option<Vec<f32>>,
    /// Whether attention stays inside of windows.
    pub(super) windowed: bool,
}

/// MiniCPM-V's merger between two layers: attention in windows of 2 × 2 patches, whose four are
/// then one: their mean, plus a feed-forward layer of all four.
#[derive(Debug)]
pub(super) struct Merger {
    /// Index of the layer after which it comes.
    pub(super) after: usize,
    pub(super) norm: Norm,
    pub(super) qkv: [Linear; 3],
    pub(super) out: Linear,
    /// From the four, side by side, to one.
    pub(super) ops: Vec<Op>,
}

/// An encoder with its projector.
#[derive(Debug)]
pub(super) struct Vit {
    pub(super) patch: usize,
    /// Convolutions of patches, whose results are added.
    pub(super) patches: Vec<Linear>,
    /// Pixels `x` enter as `a·x + b`.
    pub(super) affine: (f32, f32),
    pub(super) patch_norm: Option<Norm>,
    pub(super) positions: Option<Positions>,
    pub(super) class: Option<Class>,
    pub(super) pre_norm: Option<Norm>,
    pub(super) rope: Option<RopeSpec>,
    pub(super) heads: Heads,
    pub(super) width: usize,
    pub(super) act: Act,
    pub(super) blocks: Vec<Block>,
    pub(super) merger: Option<Merger>,
    /// Further embeddings after layers.
    pub(super) deepstack: Vec<(usize, Vec<Op>)>,
    /// From patches to embeddings.
    pub(super) ops: Vec<Op>,
    pub(super) shapes: Vec<(DType, usize)>,
}

/// What an encoder computes with.
#[derive(Clone, Copy)]
pub(super) struct Machine<'a> {
    pub(super) arch: Arch,
    pub(super) threads: &'a PoolHandle<'a>,
    pub(super) gguf: &'a Gguf,
}

/// Memory of an encoder.
struct Buffers<'a> {
    x: &'a mut [f32],
    normed: &'a mut [f32],
    branch: &'a mut [f32],
    qkv: [&'a mut [f32]; 3],
    /// Of the feed-forward layer, or the pixels of patches.
    wide: [&'a mut [f32]; 3],
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    deep: &'a mut [f32],
    attention: AttentionBuffers<'a>,
    ops: OpBuffers<'a>,
    scratch: Scratch<'a>,
}

impl Vit {
    /// Tokens, the class token included.
    fn n_tokens(&self, grid: &Grid) -> usize {
        grid.n() + usize::from(self.class.is_some())
    }

    fn n_patch(&self) -> usize {
        3 * self.patch * self.patch
    }

    /// Grid of patches behind the merger, if there is one, as the operations see it.
    fn shape(&self, grid: &Grid) -> Shape {
        let k = if self.merger.is_some() { 2 } else { 1 };
        Shape {
            grid: (grid.rows / k, grid.columns / k),
            width: self.width,
        }
    }

    /// Shape of the embeddings.
    pub(super) fn result(&self, grid: &Grid) -> Shape {
        result(&self.ops, self.shape(grid))
    }

    /// The operations that need most memory, with the shape that they begin with.
    fn largest_ops(&self, grid: &Grid) -> (Vec<&[Op]>, Shape) {
        let mut all: Vec<&[Op]> = self.deepstack.iter().map(|(_, ops)| &**ops).collect();
        all.push(&self.ops);
        (all, self.shape(grid))
    }

    fn take<'a>(
        &self,
        frame: &mut Frame<'a>,
        arch: Arch,
        n_threads: usize,
        grid: &Grid,
    ) -> Buffers<'a> {
        let (m, n) = (self.n_tokens(grid), self.width);
        let n_heads = self.heads.n * self.heads.dim;
        let n_ff = self
            .blocks
            .iter()
            .map(|block| block.up.w.n_out)
            .max()
            .unwrap_or(0);
        let wide = (m * n_ff).max(grid.n() * self.n_patch());
        let n_deep: usize = self
            .deepstack
            .iter()
            .map(|(_, ops)| result(ops, self.shape(grid)))
            .map(|shape| shape.n() * shape.width)
            .sum();
        let sizes = ProductSizes {
            arch,
            shapes: &self.shapes,
            n_threads,
            n_single: 0,
        };
        let (all, shape) = self.largest_ops(grid);
        let whole = Shape {
            grid: (grid.rows, grid.columns),
            width: n,
        };
        let merger = self.merger.iter().map(|merger| (&*merger.ops, whole));
        let ops = all.into_iter().map(|ops| (ops, shape)).chain(merger);
        let ops = ops.max_by_key(|(ops, shape)| most_values(ops, *shape));
        let (ops, shape) = ops.expect("there are operations");
        let x = frame.take(m * n);
        let [normed, branch] = [n.max(n_heads); 2].map(|n| frame.take(m * n));
        Buffers {
            x,
            normed,
            branch,
            qkv: [(); 3].map(|()| frame.take(m * n_heads)),
            wide: [wide; 3].map(|n| frame.take(n)),
            cos: frame.take(m * self.heads.dim / 2),
            sin: frame.take(m * self.heads.dim / 2),
            deep: frame.take(n_deep),
            attention: AttentionBuffers::take(frame, arch, n_threads, self.heads, (m, m)),
            ops: OpBuffers::take(frame, arch, n_threads, ops, shape),
            scratch: Scratch::take(frame, sizes, (0, m), 0),
        }
    }

    /// Bytes of the buffers that an image or tile of this grid takes.
    pub(super) fn buffer_bytes(&self, arch: Arch, n_threads: usize, grid: &Grid) -> u64 {
        counted(|frame| self.take(frame, arch, n_threads, grid)) as u64
    }

    /// Embeddings of an image, `(tokens, width)`: those of the projector, and beside them those of
    /// deepstack.
    pub(super) fn encode(
        &self,
        machine: Machine<'_>,
        arena: &mut Arena,
        grid: &Grid,
        pixels: &Pixels,
    ) -> Result<Vec<f32>, VisionError> {
        let Machine {
            arch,
            threads,
            gguf,
        } = machine;
        let mut b = arena.plan(|frame| self.take(frame, arch, threads.n_threads(), grid))?;
        let ctx = Ctx::without_adapters(arch, threads, gguf, 0);
        self.embed(ctx, &mut b, grid, pixels);
        if let Some(rope) = &self.rope {
            self.angles(arch, rope, grid, &mut b);
        }
        let mut m = self.n_tokens(grid);
        let mut n_deep = 0;
        for (i, block) in self.blocks.iter().enumerate() {
            let all = 0..m;
            let windows = if block.windowed {
                &*grid.windows
            } else {
                std::slice::from_ref(&all)
            };
            self.block(ctx, block, &mut b, windows, m);
            if let Some((_, ops)) = self.deepstack.iter().find(|(layer, _)| *layer == i) {
                let x = self.patches_of(&b.x[..m * self.width]);
                let (rows, _) = b.ops.run(ctx, &mut b.scratch, ops, x, self.shape(grid));
                b.deep[n_deep..][..rows.len()].copy_from_slice(rows);
                n_deep += rows.len();
            }
            if let Some(merger) = self.merger.as_ref().filter(|merger| merger.after == i) {
                self.merge(ctx, merger, &mut b, grid);
                m /= 4;
            }
        }
        let x = self.patches_of(&b.x[..m * self.width]);
        let (rows, shape) = b
            .ops
            .run(ctx, &mut b.scratch, &self.ops, x, self.shape(grid));
        Ok(arranged(
            rows,
            &b.deep[..n_deep],
            self.deepstack.len(),
            shape,
            grid.places.as_deref(),
        ))
    }

    /// Rows without the class token.
    fn patches_of<'x>(&self, x: &'x [f32]) -> &'x [f32] {
        match self.class.as_ref().map(|class| class.place) {
            Some(ClassPlace::First) => &x[self.width..],
            Some(ClassPlace::Last) => &x[..x.len() - self.width],
            None => x,
        }
    }

    /// What the first layer reads.
    fn embed(&self, ctx: Ctx<'_>, b: &mut Buffers<'_>, grid: &Grid, pixels: &Pixels) {
        let (n, p, n_patch) = (self.width, self.patch, self.n_patch());
        let first = match &self.class {
            Some(Class {
                place: ClassPlace::First,
                values,
            }) => {
                b.x[..n].copy_from_slice(values);
                n
            }
            Some(Class {
                place: ClassPlace::Last,
                values,
            }) => {
                b.x[grid.n() * n..][..n].copy_from_slice(values);
                0
            }
            None => 0,
        };
        let patches = &mut b.wide[0][..grid.n() * n_patch];
        let (scale, shift) = self.affine;
        ctx.threads.for_chunks(patches, n_patch, |i, patch| {
            let (r, c) = grid.order[i];
            for (j, row) in patch.chunks_exact_mut(p).enumerate() {
                let (channel, y) = (j / p, r as usize * p + j % p);
                let from = (channel * pixels.height + y) * pixels.width + c as usize * p;
                row.copy_from_slice(&pixels.values[from..][..p]);
                if (scale, shift) != (1.0, 0.0) {
                    row.iter_mut().for_each(|x| *x = scale * *x + shift);
                }
            }
        });
        let x = &mut b.x[first..][..grid.n() * n];
        let sums = &mut b.branch[..grid.n() * n];
        for (i, conv) in self.patches.iter().enumerate() {
            let y = if i == 0 { &mut *x } else { &mut *sums };
            let products = &mut [Product::of(conv, y, grid.n())];
            linear(ctx, &mut b.scratch, patches, grid.n(), products);
            if i > 0 {
                ctx.arch.add(x, sums);
            }
        }
        if let Some(norm) = &self.patch_norm {
            sums.copy_from_slice(x);
            apply_norm(ctx, norm, sums, x);
        }
        if let Some(positions) = &self.positions {
            positions.add(ctx.arch, grid, x, n);
        }
        if let Some(norm) = &self.pre_norm {
            let m = self.n_tokens(grid);
            let normed = &mut b.normed[..m * n];
            apply_norm(ctx, norm, &b.x[..m * n], normed);
            b.x[..m * n].copy_from_slice(normed);
        }
    }

    /// Angles of all tokens; the class token does not turn.
    fn angles(&self, arch: Arch, rope: &RopeSpec, grid: &Grid, b: &mut Buffers<'_>) {
        let half = self.heads.dim / 2;
        b.cos.fill(1.0);
        b.sin.fill(0.0);
        let first = match self.class.as_ref().map(|class| class.place) {
            Some(ClassPlace::First) => half,
            _ => 0,
        };
        let rows = first..first + grid.n() * half;
        rope.angles(
            arch,
            grid,
            self.heads.dim,
            &mut b.cos[rows.clone()],
            &mut b.sin[rows],
        );
    }

    /// Queries, keys and values of the rows `normed`.
    fn project(
        ctx: Ctx<'_>,
        qkv: &[Linear; 3],
        b: &mut Buffers<'_>,
        (m, width, n_heads): (usize, usize, usize),
    ) {
        let mut to = b.qkv.iter_mut().map(|y| &mut y[..m * n_heads]);
        let mut products = [0, 1, 2].map(|i| {
            let y = to.next().expect("there are three");
            Product::of(&qkv[i], y, m)
        });
        linear(
            ctx,
            &mut b.scratch,
            &b.normed[..m * width],
            m,
            &mut products,
        );
    }

    /// A layer.
    fn block(
        &self,
        ctx: Ctx<'_>,
        block: &Block,
        b: &mut Buffers<'_>,
        segments: &[Range<usize>],
        m: usize,
    ) {
        let (n, Heads { n: n_head, dim, .. }) = (self.width, self.heads);
        let n_heads = n_head * dim;
        apply_norm(ctx, &block.norm1, &b.x[..m * n], &mut b.normed[..m * n]);
        Vit::project(ctx, &block.qkv, b, (m, n, n_heads));
        for (norm, x) in [&block.q_norm, &block.k_norm, &block.v_norm]
            .into_iter()
            .zip(&mut b.qkv)
        {
            if let Some(norm) = norm {
                let room = &mut b.branch[..m * n_heads];
                apply_norm(ctx, norm, &x[..m * n_heads], room);
                x[..m * n_heads].copy_from_slice(room);
            }
        }
        if let Some(rope) = &self.rope {
            let (half, cos, sin) = (dim / 2, &*b.cos, &*b.sin);
            for x in &mut b.qkv[..2] {
                ctx.threads
                    .for_chunks(&mut x[..m * n_heads], n_heads, |row, x| {
                        let [cos, sin] = [cos, sin].map(|angles| &angles[row * half..][..half]);
                        for head in x.chunks_exact_mut(dim) {
                            rope.apply(ctx.arch, head, cos, sin);
                        }
                    });
            }
        }
        let qkv = [0, 1, 2].map(|i| &b.qkv[i][..m * n_heads]);
        let attended = &mut b.normed[..m * n_heads];
        b.attention
            .attend((ctx.arch, ctx.threads), self.heads, segments, qkv, attended);
        let y = &mut b.branch[..m * n];
        linear(
            ctx,
            &mut b.scratch,
            attended,
            m,
            &mut [Product::of(&block.out, y, m)],
        );
        add(
            ctx,
            &mut b.x[..m * n],
            y,
            &mut b.normed[..m * n],
            (&block.post_attention, &block.scale1),
        );
        self.feed_forward(ctx, block, b, m);
    }

    fn feed_forward(&self, ctx: Ctx<'_>, block: &Block, b: &mut Buffers<'_>, m: usize) {
        let (n, n_ff) = (self.width, block.up.w.n_out);
        apply_norm(ctx, &block.norm2, &b.x[..m * n], &mut b.normed[..m * n]);
        let [up, gate, room] = &mut b.wide;
        let [up, gate, room] = [up, gate, room].map(|x| &mut x[..m * n_ff]);
        let x = &b.normed[..m * n];
        let inner = if let Some(w) = &block.gate {
            let products = &mut [Product::of(w, gate, m), Product::of(&block.up, up, m)];
            linear(ctx, &mut b.scratch, x, m, products);
            let up = &*up;
            ctx.threads
                .for_chunk_pairs(gate, n_ff, room, n_ff, |i, gate, room| {
                    self.act.gate(ctx.arch, gate, &up[i * n_ff..][..n_ff], room);
                });
            gate
        } else {
            linear(
                ctx,
                &mut b.scratch,
                x,
                m,
                &mut [Product::of(&block.up, up, m)],
            );
            ctx.threads
                .for_chunk_pairs(up, n_ff, room, n_ff, |_, x, room| {
                    self.act.apply(ctx.arch, x, room);
                });
            up
        };
        let y = &mut b.branch[..m * n];
        linear(
            ctx,
            &mut b.scratch,
            inner,
            m,
            &mut [Product::of(&block.down, y, m)],
        );
        add(
            ctx,
            &mut b.x[..m * n],
            y,
            &mut b.normed[..m * n],
            (&block.post_ffn, &block.scale2),
        );
    }

    /// Four patches become one.
    fn merge(&self, ctx: Ctx<'_>, merger: &Merger, b: &mut Buffers<'_>, grid: &Grid) {
        let (m, n) = (grid.n(), self.width);
        let n_heads = self.heads.n * self.heads.dim;
        apply_norm(ctx, &merger.norm, &b.x[..m * n], &mut b.normed[..m * n]);
        Vit::project(ctx, &merger.qkv, b, (m, n, n_heads));
        let qkv = [0, 1, 2].map(|i| &b.qkv[i][..m * n_heads]);
        let attended = &mut b.normed[..m * n_heads];
        b.attention.attend(
            (ctx.arch, ctx.threads),
            self.heads,
            &grid.windows,
            qkv,
            attended,
        );
        let y = &mut b.branch[..m * n];
        linear(
            ctx,
            &mut b.scratch,
            attended,
            m,
            &mut [Product::of(&merger.out, y, m)],
        );
        ctx.arch.add(&mut b.x[..m * n], y);
        let shape = Shape {
            grid: (grid.rows, grid.columns),
            width: n,
        };
        let (one, _) = b
            .ops
            .run(ctx, &mut b.scratch, &merger.ops, &b.x[..m * n], shape);
        for i in 0..m / 4 {
            let mean = &mut b.branch[..n];
            mean.fill(0.0);
            for four in b.x[4 * i * n..][..4 * n].chunks_exact(n) {
                ctx.arch.add(mean, four);
            }
            let y = &mut b.x[i * n..][..n];
            for ((y, mean), one) in y.iter_mut().zip(mean).zip(&one[i * n..][..n]) {
                *y = *one + *mean / 4.0;
            }
        }
    }
}

/// `x += scale·norm(y)`.
fn add(
    ctx: Ctx<'_>,
    x: &mut [f32],
    y: &mut [f32],
    room: &mut [f32],
    (norm, scale): (&Option<Norm>, &Option<Vec<f32>>),
) {
    if let Some(norm) = norm {
        room.copy_from_slice(y);
        apply_norm(ctx, norm, room, y);
    }
    if let Some(scale) = scale {
        for y in y.chunks_exact_mut(scale.len()) {
            y.iter_mut().zip(scale).for_each(|(y, scale)| *y *= scale);
        }
    }
    ctx.arch.add(x, y);
}

/// Rows in the order of the prompt, with those of deepstack beside them.
fn arranged(
    rows: &[f32],
    deep: &[f32],
    n_deep: usize,
    shape: Shape,
    places: Option<&[usize]>,
) -> Vec<f32> {
    let (m, n) = (shape.n(), shape.width);
    let mut to = vec![0.0; m * n * (1 + n_deep)];
    for i in 0..m {
        let place = places.map_or(i, |places| places[i]);
        let row = &mut to[place * n * (1 + n_deep)..][..n * (1 + n_deep)];
        row[..n].copy_from_slice(&rows[i * n..][..n]);
        for (j, row) in row[n..].chunks_exact_mut(n).enumerate() {
            row.copy_from_slice(&deep[(j * m + i) * n..][..n]);
        }
    }
    to
}
