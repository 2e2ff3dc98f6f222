//! Calls that one dispatch computes, as each dispatch waits for the one before: products of few rows
//! with the same activations, as queries, keys and values are; two of them with the activation that
//! follows; and what [`joined`] has kernels for. Bits are those of single calls.

use crate::gpu::kernels::{Access, AttentionArgs, Dispatch, Element, ElementwiseArgs, MatvecArgs};
use crate::gpu::webgpu::buffer::{Bound, Buffer, Pipeline};
use crate::gpu::webgpu::joined::{F16_BITS, joined};
use crate::gpu::webgpu::pace::operations;
use crate::gpu::webgpu::shaders::{
    GATES, Instance, Matrix, attends_generated, declaration, is_rms_norm, lanes,
};
use crate::quant::DType;
use std::borrow::Cow;
use std::sync::Arc;

/// What may be one dispatch.
#[derive(Clone, Copy)]
pub(super) struct Joins {
    /// Most products.
    pub(super) products: usize,
    /// Whether calls of different kernels may.
    pub(super) kernels: bool,
    /// Most buffers besides those of pages.
    pub(super) buffers: usize,
}

/// One call, or several.
pub(super) struct Group<'c, 'a> {
    /// The first call, or that of the kernel that does the work of all.
    pub(super) dispatch: Cow<'a, Dispatch>,
    calls: &'c [Bound<'a>],
    /// Number of the first calls that it binds, unless there are `buffers`.
    n_bound: usize,
    /// What the kernel that does the work of all binds.
    buffers: Option<Vec<(&'a Buffer, u64)>>,
    /// Kernel of the last call, if that is an activation of two products.
    gate: Option<&'static str>,
}

/// What a call binds.
pub(super) struct Binding<'a> {
    pub(super) buffer: &'a Buffer,
    pub(super) offset: u64,
    /// Bytes that the kernel accesses.
    pub(super) len: u64,
    pub(super) element: Element,
    pub(super) access: Access,
    /// Format of weights.
    pub(super) format: DType,
}

fn matvec_args(dispatch: &Dispatch) -> Option<MatvecArgs> {
    (dispatch.name == "matvec").then(|| bytemuck::pod_read_unaligned(&dispatch.args))
}

/// Whether a call can be computed together with those before, which are products.
fn joins_products(before: &[Bound<'_>], (dispatch, buffers): &Bound<'_>) -> bool {
    let (first, of_first) = &before[0];
    let (Some(a), Some(b)) = (matvec_args(first), matvec_args(dispatch)) else {
        return false;
    };
    let ([_, x, _], [_, other_x, y]) = (&of_first[..], &buffers[..]) else {
        return false;
    };
    let same = |a: &(&Buffer, u64), b: &(&Buffer, u64)| (a.0.number, a.1) == (b.0.number, b.1);
    (a.n_in, a.n_rows, first.variant) == (b.n_in, b.n_rows, dispatch.variant)
        && same(x, other_x)
        && y.0.number != x.0.number
        && before.iter().all(|(_, others)| {
            others
                .last()
                .is_some_and(|other| other.0.number != y.0.number)
        })
}

/// The kernel of a call, if it is the activation of two products.
fn gate(products: &[Bound<'_>], next: Option<&Bound<'_>>) -> Option<&'static str> {
    let ([(first, of_first), (second, of_second)], (activation, buffers)) = (products, next?)
    else {
        return None;
    };
    let (a, b) = (matvec_args(first)?, matvec_args(second)?);
    let name = GATES.iter().find(|&&name| name == activation.name)?;
    let args: ElementwiseArgs = bytemuck::pod_read_unaligned(&activation.args);
    let at = |b: Option<&(&Buffer, u64)>| b.map(|b| (b.0.number, b.1));
    let are_results =
        at(buffers.first()) == at(of_first.last()) && at(buffers.get(1)) == at(of_second.last());
    let fits = a.n_out == b.n_out && args.n == a.n_rows * a.n_out;
    (are_results && fits).then_some(name)
}

impl<'c, 'a> Group<'c, 'a> {
    /// The first of a pass's calls, of which there is one at least, that one dispatch computes.
    pub(super) fn next(calls: &'c [Bound<'a>], joins: Joins) -> Group<'c, 'a> {
        if joins.kernels
            && let Some(joined) = joined(calls, joins.buffers)
        {
            return Group {
                dispatch: Cow::Owned(joined.dispatch),
                calls: &calls[..joined.n_calls],
                n_bound: 0,
                buffers: Some(joined.buffers),
                gate: None,
            };
        }
        let mut n = 1;
        while n < joins.products && n < calls.len() && joins_products(&calls[..n], &calls[n]) {
            n += 1;
        }
        let gate = gate(&calls[..n], calls.get(n)).filter(|_| joins.kernels);
        Group {
            dispatch: Cow::Borrowed(calls[0].0),
            calls: &calls[..n + usize::from(gate.is_some())],
            n_bound: n,
            buffers: None,
            gate,
        }
    }

    /// Number of its calls.
    pub(super) fn n_calls(&self) -> usize {
        self.calls.len()
    }

    /// The products after the first.
    fn more(&self) -> &'c [Bound<'a>] {
        self.calls.get(1..self.n_bound).unwrap_or_default()
    }

    /// Rows of the second and third matrix, if workgroups of their own compute them.
    pub(super) fn more_outs(&self) -> Vec<u32> {
        let outs = self.more().iter().filter(|_| self.gate.is_none());
        let outs = outs.filter_map(|(d, _)| matvec_args(d));
        outs.map(|args| args.n_out).collect()
    }

    /// What it binds in order: the buffers of the first call, then weights and results of the others.
    /// `None` if there is no such kernel.
    pub(super) fn bindings(&self) -> Option<Vec<Binding<'a>>> {
        let d = declaration(self.dispatch.name)?;
        let mut all = Vec::with_capacity(d.buffers.len() + 4);
        let mut bind = |dispatch: &Dispatch, buffers: &[(&'a Buffer, u64)], is_first: bool| {
            let table = buffers.iter().zip(&dispatch.lens).zip(&d.buffers);
            for (at, ((&(buffer, offset), &len), &(_, element, access))) in table.enumerate() {
                if is_first || at != 1 {
                    all.push(Binding {
                        buffer,
                        offset,
                        len,
                        element,
                        access,
                        format: dispatch.format,
                    });
                }
            }
        };
        if let Some(buffers) = &self.buffers {
            bind(&self.dispatch, buffers, true);
        }
        for (i, (dispatch, buffers)) in self.calls[..self.n_bound].iter().enumerate() {
            bind(dispatch, buffers, i == 0);
        }
        Some(all)
    }

    /// Writes the arguments, given the first element of each binding.
    pub(super) fn write_args(&self, starts: &[u32], to: &mut [u8]) {
        let mut at = 0;
        let mut push = |bytes: &[u8]| {
            to[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        let (first, rest) = starts.split_at(starts.len() - 2 * self.more().len());
        push(&self.dispatch.args);
        push(bytemuck::cast_slice(first));
        for ((dispatch, _), starts) in self.more().iter().zip(rest.chunks_exact(2)) {
            if let Some(args) = matvec_args(dispatch) {
                push(bytemuck::cast_slice(&[args.n_out, args.row_bytes]));
                push(bytemuck::cast_slice(starts));
            }
        }
    }
}

/// The instance for calls: with vectors, where rows and offsets are multiples of them.
pub(super) fn instance(
    group: &Group<'_, '_>,
    bindings: &[Binding<'_>],
    starts: &[(u64, u64)],
    slabs: u32,
    [forced_lanes, forced_outs]: [u32; 2],
    matrix: Option<Matrix>,
) -> Instance {
    let dispatch = &*group.dispatch;
    let mut instance = Instance {
        name: dispatch.name,
        format: dispatch.format,
        variant: dispatch.variant,
        wide: bindings.iter().any(|b| b.element == Element::Weights),
        slabs: 0,
        halves: false,
        lanes: 0,
        outs: 4,
        more: [None; 2],
        gate: group.gate,
        matrix: matrix.filter(|_| Matrix::serve(dispatch.name, dispatch.format)),
    };
    for (more, (d, _)) in instance.more.iter_mut().zip(group.more()) {
        *more = Some(d.format);
    }
    if bindings.iter().any(|b| b.element.has_addresses()) {
        instance.slabs = slabs;
    }
    if attends_generated(dispatch.name) {
        let args: AttentionArgs = bytemuck::pod_read_unaligned(&dispatch.args);
        instance.halves = [args.key_bits, args.value_bits] == [F16_BITS; 2];
    }
    instance.wide |= is_rms_norm(dispatch.name);
    if instance.wide {
        // The length of rows is the first argument of all kernels with weights, and of norms.
        let n = dispatch
            .args
            .first_chunk()
            .map_or(0, |n| u32::from_ne_bytes(*n));
        if dispatch.name.starts_with("matvec") {
            instance.lanes = match forced_lanes {
                0 => lanes(n),
                forced => forced,
            };
        }
        if (dispatch.name, dispatch.variant) == ("matvec", 1) && forced_outs != 0 {
            instance.outs = forced_outs;
        }
        let aligned = bindings.iter().zip(starts).all(|(b, start)| {
            !instance.vectors_of(b.format, b.element, b.access) || start.1 % 16 == 0
        });
        instance.wide = n % 16 == 0 && aligned;
    }
    instance
}

/// A call with the numbers of its buffers, and the byte where each begins.
type KnownCall = (Dispatch, Vec<(u64, u64)>);

/// A dispatch of the pass before. Passes of generated tokens are mostly alike, and comparing is much
/// faster than finding the kernel and the bindings again.
pub(super) struct Known {
    calls: Vec<KnownCall>,
    slabs: Vec<u64>,
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) bound: wgpu::BindGroup,
    pub(super) grid: [u32; 3],
    pub(super) operations: f64,
}

impl Known {
    pub(super) fn new(
        group: &Group<'_, '_>,
        slabs: &[&Buffer],
        (pipeline, bound): (Arc<Pipeline>, wgpu::BindGroup),
        grid: [u32; 3],
    ) -> Known {
        let numbers =
            |buffers: &[(&Buffer, u64)]| buffers.iter().map(|b| (b.0.number, b.1)).collect();
        let calls = group.calls.iter();
        Known {
            calls: calls
                .map(|(d, buffers)| ((*d).clone(), numbers(buffers)))
                .collect(),
            slabs: slabs.iter().map(|slab| slab.number).collect(),
            pipeline,
            bound,
            grid,
            operations: group.calls.iter().map(|(d, _)| operations(d)).sum(),
        }
    }

    /// Number of the first calls that are those of this dispatch; 0 if they are others.
    pub(super) fn n_same(&self, calls: &[Bound<'_>], slabs: &[&Buffer]) -> usize {
        let same = |(known, (other, buffers)): (&KnownCall, &Bound<'_>)| {
            let (d, numbers) = known;
            (d.name, d.format, d.variant) == (other.name, other.format, other.variant)
                && d.args == other.args
                && d.lens == other.lens
                && d.grid == other.grid
                && numbers.len() == buffers.len()
                && numbers
                    .iter()
                    .zip(buffers)
                    .all(|(a, b)| *a == (b.0.number, b.1))
        };
        let is_same = calls.len() >= self.calls.len()
            && self.calls.iter().zip(calls).all(same)
            && self.slabs.len() == slabs.len()
            && self.slabs.iter().zip(slabs).all(|(a, b)| *a == b.number);
        if is_same { self.calls.len() } else { 0 }
    }
}
