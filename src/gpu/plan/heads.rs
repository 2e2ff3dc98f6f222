//! Parts of heads that are copied.

use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::{Name, Planner, size};
use crate::quant::DType;

/// A part of heads: from value `first` of a row on, with the distances from a head and from a row
/// to the next.
#[derive(Clone, Copy)]
pub(super) struct HeadPart<'m> {
    pub(super) buffer: Name<'m>,
    pub(super) first: usize,
    pub(super) head: usize,
    pub(super) row: usize,
}

impl<'m> HeadPart<'m> {
    /// From value `first` on of each of `n_head` heads of `head_dim` values.
    pub(super) fn of(
        buffer: Name<'m>,
        (n_head, head_dim): (usize, usize),
        first: usize,
    ) -> HeadPart<'m> {
        HeadPart {
            buffer,
            first,
            head: head_dim,
            row: n_head * head_dim,
        }
    }
}

impl<'m> Planner<'m, '_> {
    /// Copies `n` values of each head of the current rows.
    pub(super) fn copy_heads(
        &mut self,
        (n_head, n): (usize, usize),
        from: HeadPart<'m>,
        to: HeadPart<'m>,
    ) -> Result<(), GpuError> {
        let args = CopyHeadsArgs {
            n: size(n)?,
            n_head: size(n_head)?,
            n_rows: self.rows.n,
            x_head: size(from.head)?,
            x_row: size(from.row)?,
            y_head: size(to.head)?,
            y_row: size(to.row)?,
        };
        let buffers = [from, to].map(|part| (part.buffer, 4 * part.first as u64));
        self.push((&COPY_HEADS, DType::F32, 0), &args, &buffers, None);
        Ok(())
    }
}
