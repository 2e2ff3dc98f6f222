//! What follows an encoder's layers: a list of operations from patches to embeddings, as data.

use crate::arch::{Arch, CacheLine};
use crate::compute::arena::Frame;
use crate::compute::linear::{Ctx, Product, Scratch, linear, transposed};
use crate::compute::weight::{Linear, Weight};
use crate::layers::norm::spec::NormKind;
use crate::vision::file::Norm;

/// Activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// GELU by the error function.
    GeluErf,
    /// GELU, tanh approximation.
    GeluTanh,
    /// `x·σ(1.702·x)`.
    QuickGelu,
    /// `x·σ(x)`.
    Silu,
}

impl Act {
    /// `x = act(x)`; `room` is as long.
    pub(super) fn apply(self, arch: Arch, x: &mut [f32], room: &mut [f32]) {
        match self {
            Act::GeluErf => arch.gelu_erf(x),
            Act::GeluTanh => arch.gelu(x),
            Act::QuickGelu | Act::Silu => {
                let factor = if self == Act::Silu { 1.0 } else { 1.702 };
                room.copy_from_slice(x);
                x.iter_mut().for_each(|x| *x *= factor);
                arch.sigmoid_mul(x, room);
            }
        }
    }

    /// `gate = act(gate)·up`; `room` is as long.
    pub(super) fn gate(self, arch: Arch, gate: &mut [f32], up: &[f32], room: &mut [f32]) {
        match self {
            Act::Silu => arch.silu_mul(gate, up),
            Act::GeluTanh => arch.gelu_mul(gate, up),
            Act::GeluErf => arch.gelu_erf_mul(gate, up),
            Act::QuickGelu => {
                self.apply(arch, gate, room);
                gate.iter_mut().zip(up).for_each(|(gate, up)| *gate *= up);
            }
        }
    }
}

/// Order of the values of a block of patches that are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JoinOrder {
    /// Patch by patch.
    ByPatch,
    /// Channel by channel.
    ByChannel,
}

/// An operation on rows.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// A norm, as wide as its weights.
    Norm(Norm),
    /// A product.
    Linear(Linear),
    /// A product with the transpose of a stored matrix.
    Transposed(Weight),
    /// An activation.
    Act(Act),
    /// `act(W·x)·(V·x)`.
    Gated { gate: Linear, up: Linear, act: Act },
    /// Neighbouring blocks of `k × k` patches of a grid in row order become a row each.
    Join { k: usize, order: JoinOrder },
    /// Runs of `n` rows become one.
    Widen(usize),
    /// Runs of `n` rows, one after the other patch, become one, channel by channel.
    WidenByChannel(usize),
    /// Means of blocks of `k × k` patches.
    Pool(usize),
    /// A factor.
    Scale(f32),
}

/// Size of rows under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Rows and columns of the grid.
    pub(super) grid: (usize, usize),
    pub(super) width: usize,
}

impl Shape {
    pub(super) fn n(self) -> usize {
        self.grid.0 * self.grid.1
    }

    /// After an operation.
    fn after(self, op: &Op) -> Shape {
        let Shape { grid, width } = self;
        let shrunk = |k: usize| (grid.0 / k, grid.1 / k);
        match op {
            Op::Norm(_) | Op::Act(_) | Op::Scale(_) => self,
            Op::Linear(l) | Op::Gated { up: l, .. } => Shape {
                grid,
                width: l.w.n_out,
            },
            Op::Transposed(w) => Shape {
                grid,
                width: w.n_in,
            },
            Op::Join { k, .. } => Shape {
                grid: shrunk(*k),
                width: width * k * k,
            },
            Op::Widen(n) | Op::WidenByChannel(n) => {
                let k = n.isqrt();
                Shape {
                    grid: shrunk(k),
                    width: width * n,
                }
            }
            Op::Pool(k) => Shape {
                grid: shrunk(*k),
                width,
            },
        }
    }
}

/// The shape after all operations.
pub(super) fn result(ops: &[Op], shape: Shape) -> Shape {
    ops.iter().fold(shape, Shape::after)
}

/// Most values of rows under way.
pub(super) fn most_values(ops: &[Op], mut shape: Shape) -> usize {
    let mut most = shape.n() * shape.width;
    for op in ops {
        shape = shape.after(op);
        most = most.max(shape.n() * shape.width);
    }
    most
}

/// Memory of operations.
pub(super) struct OpBuffers<'a> {
    a: &'a mut [f32],
    b: &'a mut [f32],
    c: &'a mut [f32],
    packed: &'a mut [u8],
    workspace: &'a mut [CacheLine],
}

impl<'a> OpBuffers<'a> {
    pub(super) fn take(
        frame: &mut Frame<'a>,
        arch: Arch,
        n_threads: usize,
        ops: &[Op],
        shape: Shape,
    ) -> OpBuffers<'a> {
        let n = most_values(ops, shape);
        let (mut packed, mut workspace, mut now) = (0, 0, shape);
        for op in ops {
            if let Op::Transposed(w) = op {
                let product = arch.transposed(w.dtype, w.n_out, w.n_in);
                packed = packed.max(product.packed_len(now.n()));
                workspace = workspace.max(n_threads * product.workspace());
            }
            now = now.after(op);
        }
        OpBuffers {
            a: frame.take(n),
            b: frame.take(n),
            c: frame.take(n),
            packed: frame.take(packed),
            workspace: frame.take(workspace),
        }
    }

    /// Runs operations on rows `x`; returns the result and its shape.
    pub(super) fn run(
        &mut self,
        ctx: Ctx<'_>,
        scratch: &mut Scratch<'_>,
        ops: &[Op],
        x: &[f32],
        mut shape: Shape,
    ) -> (&[f32], Shape) {
        self.a[..x.len()].copy_from_slice(x);
        for op in ops {
            let next = shape.after(op);
            let (n_in, n_out) = (shape.n() * shape.width, next.n() * next.width);
            let is_in_place = matches!(op, Op::Act(_) | Op::Scale(_) | Op::Widen(_));
            self.step(ctx, scratch, op, (shape, next), (n_in, n_out));
            if !is_in_place {
                std::mem::swap(&mut self.a, &mut self.b);
            }
            shape = next;
        }
        (&self.a[..shape.n() * shape.width], shape)
    }

    /// One operation from `a` to `b`, or in `a`.
    fn step(
        &mut self,
        ctx: Ctx<'_>,
        scratch: &mut Scratch<'_>,
        op: &Op,
        (shape, next): (Shape, Shape),
        (n_in, n_out): (usize, usize),
    ) {
        let (x, y) = (&mut self.a[..n_in], &mut self.b[..n_out]);
        match op {
            Op::Norm(norm) => apply_norm(ctx, norm, x, y),
            Op::Linear(w) => linear(
                ctx,
                scratch,
                x,
                shape.n(),
                &mut [Product::of(w, y, shape.n())],
            ),
            Op::Transposed(w) => transposed(ctx, self.packed, self.workspace, w, x, shape.n(), y),
            Op::Act(act) => {
                let width = shape.width;
                ctx.threads
                    .for_chunk_pairs(x, width, &mut self.c[..n_in], width, |_, x, room| {
                        act.apply(ctx.arch, x, room);
                    });
            }
            Op::Gated { gate, up, act } => {
                let (m, of_up) = (shape.n(), &mut self.c[..n_out]);
                linear(
                    ctx,
                    scratch,
                    x,
                    m,
                    &mut [Product::of(gate, y, m), Product::of(up, of_up, m)],
                );
                // The input is not needed any more.
                let room = &mut self.a[..n_out];
                act.gate(ctx.arch, y, of_up, room);
            }
            Op::Join { k, order } => {
                let (columns, w) = (shape.grid.1, shape.width);
                for (i, y) in y.chunks_exact_mut(next.width).enumerate() {
                    let (r, c) = (i / next.grid.1, i % next.grid.1);
                    let patch = |j: usize| {
                        let row = (r * k + j / k) * columns + c * k + j % k;
                        &x[row * w..][..w]
                    };
                    join(y, k * k, *order, patch);
                }
            }
            Op::Widen(_) => {}
            Op::WidenByChannel(n) => {
                let w = shape.width;
                for (y, x) in y
                    .chunks_exact_mut(next.width)
                    .zip(x.chunks_exact(next.width))
                {
                    join(y, *n, JoinOrder::ByChannel, |j| &x[j * w..][..w]);
                }
            }
            Op::Pool(k) => {
                let (columns, w) = (shape.grid.1, shape.width);
                y.fill(0.0);
                for (i, y) in y.chunks_exact_mut(w).enumerate() {
                    let (r, c) = (i / next.grid.1, i % next.grid.1);
                    for j in 0..k * k {
                        let row = (r * k + j / k) * columns + c * k + j % k;
                        ctx.arch.add(y, &x[row * w..][..w]);
                    }
                    y.iter_mut().for_each(|y| *y /= (k * k) as f32);
                }
            }
            Op::Scale(factor) => x.iter_mut().for_each(|x| *x *= factor),
        }
    }
}

fn join<'x>(y: &mut [f32], n: usize, order: JoinOrder, patch: impl Fn(usize) -> &'x [f32]) {
    let w = y.len() / n;
    for j in 0..n {
        let patch = patch(j);
        match order {
            JoinOrder::ByPatch => y[j * w..][..w].copy_from_slice(patch),
            JoinOrder::ByChannel => {
                y.iter_mut()
                    .skip(j)
                    .step_by(n)
                    .zip(patch)
                    .for_each(|(y, x)| *y = *x);
            }
        }
    }
}

/// Applies a norm to rows as wide as its weights.
pub(super) fn apply_norm(ctx: Ctx<'_>, norm: &Norm, x: &[f32], y: &mut [f32]) {
    let n = norm.w.len();
    ctx.threads.for_chunks(y, n, |i, y| {
        let x = &x[i * n..][..n];
        match norm.kind {
            NormKind::Rms => ctx.arch.rms_norm(y, x, &norm.w, norm.eps),
            _ => ctx.arch.layer_norm(y, x, &norm.w, &norm.b, norm.eps),
        }
    });
}
