//! Attention of an encoder: each token sees all tokens of its segment. In `f32`, by the kernels of
//! products with transposed matrices, as heads are too narrow for those that read rows.

use crate::arch::{Arch, CacheLine, ColumnsMut, TransposedProduct};
use crate::compute::arena::{Frame, counted};
use crate::quant::DType;
use crate::threads::{PoolHandle, Tiled};
use std::ops::Range;

/// Rows of a task: what they are multiplied with is read once for all of them. Bits do not depend on
/// it.
const TASK_ROWS: usize = 96;

/// Sizes of attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) n: usize,
    pub(super) dim: usize,
    /// Factor on `q·k`.
    pub(super) scale: f32,
}

impl Heads {
    /// The products with keys and with values of a segment.
    fn products(self, arch: Arch, len: usize) -> [TransposedProduct; 2] {
        [
            arch.transposed(DType::F32, self.dim, len),
            arch.transposed(DType::F32, len, self.dim),
        ]
    }
}

/// Memory of a worker.
struct Room<'a> {
    q: &'a mut [f32],
    packed: &'a mut [u8],
    scores: &'a mut [f32],
    workspace: &'a mut [CacheLine],
}

impl<'a> Room<'a> {
    fn take(frame: &mut Frame<'a>, arch: Arch, heads: Heads, longest: usize) -> Room<'a> {
        let products = heads.products(arch, longest);
        let packed = products.map(|product| product.packed_len(TASK_ROWS));
        Room {
            q: frame.take(TASK_ROWS * heads.dim),
            packed: frame.take(packed[0].max(packed[1])),
            scores: frame.take(TASK_ROWS * longest),
            workspace: frame.take(products[0].workspace()),
        }
    }
}

/// Memory of attention over `m` tokens.
pub(super) struct AttentionBuffers<'a> {
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// Outputs by head, `(heads, m, dim)`, `m` rounded up to whole tasks.
    out: &'a mut [f32],
    rooms: &'a mut [CacheLine],
    longest: usize,
}

impl<'a> AttentionBuffers<'a> {
    /// `longest` is the length of the longest segment.
    pub(super) fn take(
        frame: &mut Frame<'a>,
        arch: Arch,
        n_threads: usize,
        heads: Heads,
        (m, longest): (usize, usize),
    ) -> AttentionBuffers<'a> {
        let room = counted(|frame| Room::take(frame, arch, heads, longest));
        let n = heads.n * heads.dim;
        AttentionBuffers {
            keys: frame.take(m * n),
            values: frame.take(m * n),
            out: frame.take(m.next_multiple_of(TASK_ROWS) * n),
            rooms: frame.take(n_threads * room / size_of::<CacheLine>()),
            longest,
        }
    }

    /// Values by head, and keys by head and segment, transposed.
    fn lay_out(
        &mut self,
        threads: &PoolHandle<'_>,
        heads: Heads,
        segments: &[Range<usize>],
        (k, v): (&[f32], &[f32]),
    ) {
        let Heads { n, dim, .. } = heads;
        let (by_head, width) = (k.len() / n, n * dim);
        threads.for_chunks(&mut self.values[..n * by_head], by_head, |head, values| {
            for (values, row) in values.chunks_exact_mut(dim).zip(v.chunks_exact(width)) {
                values.copy_from_slice(&row[head * dim..][..dim]);
            }
        });
        threads.for_chunks(&mut self.keys[..n * by_head], by_head, |head, keys| {
            for segment in segments {
                let keys = &mut keys[segment.start * dim..segment.end * dim];
                for (j, keys) in keys.chunks_exact_mut(segment.len()).enumerate() {
                    for (key, row) in keys.iter_mut().zip(segment.clone()) {
                        *key = k[row * width + head * dim + j];
                    }
                }
            }
        });
    }

    /// `out = softmax(scale·q·kᵀ)·v` per head and segment; all are `(m, n·dim)`.
    pub(super) fn attend(
        &mut self,
        (arch, threads): (Arch, &PoolHandle<'_>),
        heads: Heads,
        segments: &[Range<usize>],
        [q, k, v]: [&[f32]; 3],
        out: &mut [f32],
    ) {
        let Heads { n, dim, scale } = heads;
        let (m_all, width) = (q.len() / (n * dim), n * dim);
        self.lay_out(threads, heads, segments, (k, v));
        let (keys, values, longest) = (&*self.keys, &*self.values, self.longest);
        let of_task = TASK_ROWS * dim;
        let n_tasks = m_all.div_ceil(TASK_ROWS);
        let all = &mut self.out[..n * n_tasks * of_task];
        let n_all = all.len();
        let mut tiles = [Tiled {
            y: ColumnsMut::new(all, 1, n_all),
            width: of_task,
            item: (),
        }];
        threads.for_tiles(&mut tiles, self.rooms, |(), columns, y, room| {
            let (head, first) = (
                columns.start / of_task / n_tasks,
                columns.start / of_task % n_tasks * TASK_ROWS,
            );
            let mut frame = Frame::of(bytemuck::cast_slice_mut(room));
            let room = Room::take(&mut frame, arch, heads, longest);
            let end = m_all.min(first + TASK_ROWS);
            let before = segments.partition_point(|segment| segment.end <= first);
            for segment in segments[before..].iter().take_while(|s| s.start < end) {
                let rows = first.max(segment.start)..end.min(segment.end);
                let (m, len) = (rows.len(), segment.len());
                let q_rows = room.q.chunks_exact_mut(dim);
                for (to, row) in q_rows.zip(rows.clone()) {
                    let q = &q[row * width + head * dim..][..dim];
                    to.iter_mut().zip(q).for_each(|(to, q)| *to = q * scale);
                }
                let part = (head * m_all + segment.start) * dim..(head * m_all + segment.end) * dim;
                let [by_keys, by_values] = heads.products(arch, len);
                let scores = &mut room.scores[..m * len];
                multiply(
                    &by_keys,
                    (&room.q[..m * dim], m),
                    &keys[part.clone()],
                    room.packed,
                    scores,
                    room.workspace,
                );
                scores
                    .chunks_exact_mut(len)
                    .for_each(|row| arch.softmax(row));
                let to = (rows.start - first) * dim..(rows.end - first) * dim;
                multiply(
                    &by_values,
                    (scores, m),
                    &values[part],
                    room.packed,
                    &mut y.row(0)[to],
                    room.workspace,
                );
            }
        });
        let by_head = &*self.out;
        threads.for_chunks(out, width, |row, out| {
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                out.copy_from_slice(&by_head[(head * n_tasks * TASK_ROWS + row) * dim..][..dim]);
            }
        });
    }
}

/// `y = x·w` for `m` rows.
fn multiply(
    product: &TransposedProduct,
    (x, m): (&[f32], usize),
    w: &[f32],
    packed: &mut [u8],
    y: &mut [f32],
    workspace: &mut [CacheLine],
) {
    let (n, group) = (x.len() / m, product.group());
    let packed = &mut packed[..product.packed_len(m)];
    let groups = packed.chunks_mut(product.packed_len(group));
    for (packed, x) in groups.zip(x.chunks(group * n)) {
        product.pack(x, x.len() / n, packed);
    }
    let n_out = y.len() / m;
    let mut y = ColumnsMut::new(y, m, n_out);
    for first in (0..n_out).step_by(product.tile()) {
        let cols = product.tile().min(n_out - first);
        product.multiply(
            &mut y.columns_mut(first..first + cols),
            first,
            bytemuck::cast_slice(w),
            packed,
            workspace,
        );
    }
}
