//! Attention of an encoder: each token sees all tokens of its segment. In `f32`, by the kernels of
//! products: keys are the weights of scores, and values, transposed, those of outputs.

use crate::arch::{Arch, CacheLine, ColumnsMut};
use crate::compute::arena::{Frame, counted};
use crate::quant::DType;
use crate::threads::PoolHandle;
use std::ops::Range;

/// Rows of a task. Bits do not depend on it.
const TASK_ROWS: usize = 64;
/// Tasks per thread in a parallel region, which share memory.
const TASKS_PER_THREAD: usize = 4;

/// Sizes of attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) n: usize,
    pub(super) dim: usize,
    /// Factor on `q·k`.
    pub(super) scale: f32,
}

/// A task: rows of a head.
struct Task {
    head: usize,
    segment: Range<usize>,
    rows: Range<usize>,
}

/// Memory of a task.
struct Room<'a> {
    q: &'a mut [f32],
    packed: &'a mut [u8],
    scores: &'a mut [f32],
    out: &'a mut [f32],
    workspace: &'a mut [CacheLine],
}

/// Bytes of packed rows, whose number and width vary.
fn packed_len(arch: Arch, m: usize, n: usize) -> usize {
    arch.packed_len(DType::F32, m, n)
}

impl<'a> Room<'a> {
    fn take(frame: &mut Frame<'a>, arch: Arch, heads: Heads, longest: usize) -> Room<'a> {
        // Fewer rows may be packed otherwise.
        let packed = (1..=TASK_ROWS)
            .map(|m| packed_len(arch, m, heads.dim).max(packed_len(arch, m, longest)))
            .max();
        Room {
            q: frame.take(TASK_ROWS * heads.dim),
            packed: frame.take(packed.unwrap_or(0)),
            scores: frame.take(TASK_ROWS * longest),
            out: frame.take(TASK_ROWS * heads.dim),
            workspace: frame.take(arch.gemm_workspace(DType::F32)),
        }
    }
}

/// Memory of attention over `m` tokens.
pub(super) struct AttentionBuffers<'a> {
    keys: &'a mut [f32],
    values: &'a mut [f32],
    rooms: &'a mut [CacheLine],
    room_bytes: usize,
    longest: usize,
    /// Those of a parallel region; its memory lasts for all layers.
    tasks: Vec<Task>,
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
        let room_bytes = counted(|frame| Room::take(frame, arch, heads, longest));
        let n_rooms = n_threads * TASKS_PER_THREAD;
        AttentionBuffers {
            keys: frame.take(m * heads.n * heads.dim),
            values: frame.take(m * heads.n * heads.dim),
            rooms: frame.take(n_rooms * room_bytes / size_of::<CacheLine>()),
            room_bytes,
            longest,
            tasks: Vec::new(),
        }
    }

    /// Keys by head, and values by head and segment, transposed.
    fn lay_out(
        &mut self,
        threads: &PoolHandle<'_>,
        heads: Heads,
        segments: &[Range<usize>],
        (k, v): (&[f32], &[f32]),
    ) {
        let Heads { n, dim, .. } = heads;
        let (by_head, width) = (k.len() / n, n * dim);
        threads.for_chunks(&mut self.keys[..n * by_head], by_head, |head, keys| {
            for (row, keys) in keys.chunks_exact_mut(dim).enumerate() {
                keys.copy_from_slice(&k[row * width + head * dim..][..dim]);
            }
        });
        threads.for_chunks(&mut self.values[..n * by_head], by_head, |head, values| {
            for segment in segments {
                let values = &mut values[segment.start * dim..segment.end * dim];
                for (j, values) in values.chunks_exact_mut(segment.len()).enumerate() {
                    for (value, row) in values.iter_mut().zip(segment.clone()) {
                        *value = v[row * width + head * dim + j];
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
        let (m, width) = (q.len() / (n * dim), n * dim);
        let by_head = m * dim;
        self.lay_out(threads, heads, segments, (k, v));
        let (keys, values, longest) = (&*self.keys, &*self.values, self.longest);
        let tasks = |segment: &Range<usize>| {
            let segment = segment.clone();
            let n_blocks = segment.len().div_ceil(TASK_ROWS);
            (0..n * n_blocks).map(move |i| {
                let first = segment.start + i % n_blocks * TASK_ROWS;
                Task {
                    head: i / n_blocks,
                    segment: segment.clone(),
                    rows: first..segment.end.min(first + TASK_ROWS),
                }
            })
        };
        let mut tasks = segments.iter().flat_map(tasks);
        let lines = self.room_bytes / size_of::<CacheLine>();
        let n_rooms = self.rooms.len() / lines;
        let now = &mut self.tasks;
        loop {
            now.clear();
            now.extend(tasks.by_ref().take(n_rooms));
            if now.is_empty() {
                break;
            }
            let rooms = &mut self.rooms[..now.len() * lines];
            threads.for_chunks(rooms, lines, |i, room| {
                let Task {
                    head,
                    segment,
                    rows,
                } = &now[i];
                let mut frame = Frame::of(bytemuck::cast_slice_mut(room));
                let room = Room::take(&mut frame, arch, heads, longest);
                let part = head * by_head + segment.start * dim..head * by_head + segment.end * dim;
                for (to, row) in room.q.chunks_exact_mut(dim).zip(rows.clone()) {
                    let q = &q[row * width + head * dim..][..dim];
                    to.iter_mut().zip(q).for_each(|(to, q)| *to = q * scale);
                }
                let (m, n_keys) = (rows.len(), segment.len());
                let multiply = |x: &[f32],
                                n: usize,
                                packed: &mut [u8],
                                w: &[f32],
                                y: &mut [f32],
                                workspace: &mut [CacheLine]| {
                    let packed = &mut packed[..packed_len(arch, m, n)];
                    pack(arch, x, m, n, packed);
                    let n_out = y.len() / m;
                    let y = &mut ColumnsMut::new(y, m, n_out);
                    arch.gemm(DType::F32, y, bytemuck::cast_slice(w), packed, n, workspace);
                };
                let scores = &mut room.scores[..m * n_keys];
                multiply(
                    &room.q[..m * dim],
                    dim,
                    &mut *room.packed,
                    &keys[part.clone()],
                    scores,
                    &mut *room.workspace,
                );
                scores
                    .chunks_exact_mut(n_keys)
                    .for_each(|row| arch.softmax(row));
                let out = &mut room.out[..m * dim];
                multiply(
                    scores,
                    n_keys,
                    room.packed,
                    &values[part],
                    out,
                    room.workspace,
                );
            });
            for (Task { head, rows, .. }, room) in now.iter().zip(rooms.chunks_exact_mut(lines)) {
                let mut frame = Frame::of(bytemuck::cast_slice_mut(room));
                let room = Room::take(&mut frame, arch, heads, longest);
                for (from, row) in room.out.chunks_exact(dim).zip(rows.clone()) {
                    out[row * width + head * dim..][..dim].copy_from_slice(from);
                }
            }
        }
    }
}

/// Packs `m` rows of `n` values.
fn pack(arch: Arch, x: &[f32], m: usize, n: usize, packed: &mut [u8]) {
    let group = arch.pack_group(DType::F32);
    let bytes = packed_len(arch, group, n);
    if m <= group {
        return arch.pack(DType::F32, x, m, n, packed);
    }
    for (i, packed) in packed.chunks_mut(bytes).enumerate() {
        let rows = group.min(m - i * group);
        arch.pack(DType::F32, &x[i * group * n..][..rows * n], m, n, packed);
    }
}
