//! Calls that one dispatch computes: products of few rows with the same activations, as queries, keys
//! and values are, as each dispatch waits for the one before. Bits are those of single calls.

use crate::gpu::kernels::{Access, Dispatch, Element, MatvecArgs};
use crate::gpu::webgpu::buffer::{Buffer, Pipeline};
use crate::gpu::webgpu::shaders::{Instance, declaration, lanes};
use crate::quant::DType;
use std::sync::Arc;

/// A call with the buffers that it binds, each from a byte on.
pub(super) type Bound<'a> = (&'a Dispatch, Vec<(&'a Buffer, u64)>);

/// One call, or several products.
pub(super) struct Group<'c, 'a> {
    /// The first call.
    pub(super) dispatch: &'a Dispatch,
    calls: &'c [Bound<'a>],
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
fn joins(before: &[Bound<'_>], (dispatch, buffers): &Bound<'_>) -> bool {
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

impl<'c, 'a> Group<'c, 'a> {
    /// The next calls of a pass that one dispatch computes, at most `most`; `None` after the last.
    pub(super) fn next(calls: &'c [Bound<'a>], most: u32) -> Option<Group<'c, 'a>> {
        let (dispatch, _) = calls.first()?;
        let mut n = 1;
        while n < most as usize && n < calls.len() && joins(&calls[..n], &calls[n]) {
            n += 1;
        }
        Some(Group {
            dispatch,
            calls: &calls[..n],
        })
    }

    /// Number of its calls.
    pub(super) fn n_calls(&self) -> usize {
        self.calls.len()
    }

    /// Rows of the second and third matrix.
    pub(super) fn more_outs(&self) -> Vec<u32> {
        let outs = self.calls[1..].iter().filter_map(|(d, _)| matvec_args(d));
        outs.map(|args| args.n_out).collect()
    }

    /// What it binds in order: the buffers of the first call, then weights and results of the others.
    /// `None` if there is no such kernel.
    pub(super) fn bindings(&self) -> Option<Vec<Binding<'a>>> {
        let d = declaration(self.dispatch.name)?;
        let mut all = Vec::with_capacity(d.buffers.len() + 4);
        for (i, (dispatch, buffers)) in self.calls.iter().enumerate() {
            let table = buffers.iter().zip(&dispatch.lens).zip(&d.buffers);
            for (at, ((&(buffer, offset), &len), &(_, element, access))) in table.enumerate() {
                if i == 0 || at != 1 {
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
        let (first, rest) = starts.split_at(self.calls[0].1.len());
        push(&self.dispatch.args);
        push(bytemuck::cast_slice(first));
        for ((dispatch, _), starts) in self.calls[1..].iter().zip(rest.chunks_exact(2)) {
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
    forced: u32,
) -> Instance {
    let dispatch = group.dispatch;
    let mut instance = Instance {
        name: dispatch.name,
        format: dispatch.format,
        variant: dispatch.variant,
        wide: bindings.iter().any(|b| b.element == Element::Weights),
        slabs: 0,
        lanes: 0,
        more: [None; 2],
    };
    for (more, (d, _)) in instance.more.iter_mut().zip(&group.calls[1..]) {
        *more = Some(d.format);
    }
    if bindings.iter().any(|b| b.element == Element::Page) {
        instance.slabs = slabs;
    }
    if instance.wide {
        // The length of rows is the first argument of all kernels with weights.
        let n = dispatch
            .args
            .first_chunk()
            .map_or(0, |n| u32::from_ne_bytes(*n));
        if dispatch.name.starts_with("matvec") {
            instance.lanes = if forced == 0 { lanes(n) } else { forced };
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
