//! Calls of different kernels for which there is one that does the work of all, with the same bits:
//! what happens to heads between products and attention, and attention with its merge where there is
//! one split. Partial results of attention are then never written, which nothing but the merge reads.

use crate::gpu::kernels::{
    APPEND, ATTENTION_DECODE, ATTENTION_MERGE, ATTENTION_SINGLE, AppendArgs, Args, AttentionArgs,
    Dispatch, HEADS, HeadsArgs, Kernel, NormArgs, RMS_NORM_HEADS, ROPE_NEOX, ROPE_NORM, RopeArgs,
};
use crate::gpu::webgpu::buffer::{Bound, Buffer};
use crate::quant::DType;

/// Bits per value of keys and values in f16.
pub(super) const F16_BITS: u32 = 16;
/// Most values of a head that the kernel takes.
const MAX_HEAD: u32 = 512;

/// The kernel that does the work of the first calls.
pub(super) struct Joined<'a> {
    pub(super) n_calls: usize,
    pub(super) dispatch: Dispatch,
    pub(super) buffers: Vec<(&'a Buffer, u64)>,
}

/// The kernel for the first of `calls`, if it binds at most `room` buffers.
pub(super) fn joined<'a>(calls: &[Bound<'a>], room: usize) -> Option<Joined<'a>> {
    let joined = heads(calls).or_else(|| attention(calls))?;
    (joined.buffers.len() <= room).then_some(joined)
}

/// The arguments and buffers of the next call, if it is one of this kernel.
fn take<'c, 'a, A: Args>(
    calls: &mut &'c [Bound<'a>],
    kernel: &Kernel<A>,
) -> Option<(A, &'c [(&'a Buffer, u64)])> {
    let ((dispatch, buffers), rest) = calls.split_first()?;
    if dispatch.name != kernel.name {
        return None;
    }
    *calls = rest;
    Some((bytemuck::pod_read_unaligned(&dispatch.args), buffers))
}

/// Whether two bindings are the same memory.
fn same((a, at): (&Buffer, u64), (b, other): (&Buffer, u64)) -> bool {
    a.number == b.number && at == other
}

fn heads<'a>(calls: &[Bound<'a>]) -> Option<Joined<'a>> {
    let mut rest = calls;
    let k_norm = take(&mut rest, &RMS_NORM_HEADS);
    let is_neox = rest.first()?.0.name == ROPE_NEOX.name;
    let rope = if is_neox { &ROPE_NEOX } else { &ROPE_NORM };
    let (of_k, k_rope): (RopeArgs, _) = take(&mut rest, rope)?;
    let (append, of_append): (AppendArgs, _) = take(&mut rest, &APPEND)?;
    let q_norm = take(&mut rest, &RMS_NORM_HEADS);
    let (of_q, q_rope): (RopeArgs, _) = take(&mut rest, rope)?;
    let (&[k, angles], &[q, q_angles]) = (k_rope, q_rope) else {
        return None;
    };
    let &[keys, v, rows, pages] = of_append else {
        return None;
    };
    let (q_weights, k_weights, n_norm, eps) = match (q_norm, k_norm) {
        (None, None) => (angles, angles, 0, 0.0),
        (Some((a, &[normed_q, q_weights])), Some((b, &[normed_k, k_weights]))) => {
            let (a, b): (NormArgs, NormArgs) = (a, b);
            let alike = (a.n, a.eps.to_bits()) == (b.n, b.eps.to_bits()) && a.n == of_q.head_dim;
            if !alike || !same(normed_q, q) || !same(normed_k, k) {
                return None;
            }
            (q_weights, k_weights, a.n, a.eps)
        }
        _ => return None,
    };
    let shapes = |rope: &RopeArgs| (rope.n_rows, rope.head_dim, rope.n_dims);
    let fits = shapes(&of_k) == shapes(&of_q)
        && (of_k.first, of_q.first) == (0, 0)
        && (of_k.n_rows, of_k.head_dim) == (append.n_rows, append.head_dim)
        && of_k.n_head == append.n_head_kv
        && append.head_dim.max(append.head_dim_v) <= MAX_HEAD
        && [append.key_bits, append.value_bits] == [F16_BITS; 2];
    if !fits || !same(keys, k) || !same(angles, q_angles) {
        return None;
    }
    let args = HeadsArgs {
        n_rows: append.n_rows,
        n_pages: append.n_pages,
        n_head: of_q.n_head,
        n_head_kv: append.n_head_kv,
        head_dim: append.head_dim,
        head_dim_v: append.head_dim_v,
        key_offset: append.key_offset,
        value_offset: append.value_offset,
        n_dims: of_q.n_dims,
        n_norm,
        eps,
    };
    let variant = u32::from(is_neox) + 2 * u32::from(n_norm > 0);
    Some(Joined {
        n_calls: calls.len() - rest.len(),
        dispatch: HEADS.dispatch(DType::F32, variant, &args),
        buffers: vec![q, k, v, q_weights, k_weights, angles, rows, pages],
    })
}

fn attention<'a>(calls: &[Bound<'a>]) -> Option<Joined<'a>> {
    let mut rest = calls;
    let variant = rest.first()?.0.variant;
    let (args, decode): (AttentionArgs, _) = take(&mut rest, &ATTENTION_DECODE)?;
    let (_, merge): (AttentionArgs, _) = take(&mut rest, &ATTENTION_MERGE)?;
    let (&[q, rows, pages, partial], &[merged, merged_rows, sinks, out]) = (decode, merge) else {
        return None;
    };
    if args.n_splits != 1 || !same(partial, merged) || !same(rows, merged_rows) {
        return None;
    }
    Some(Joined {
        n_calls: 2,
        dispatch: ATTENTION_SINGLE.dispatch(DType::F32, variant, &args),
        buffers: vec![q, rows, pages, sinks, out],
    })
}
