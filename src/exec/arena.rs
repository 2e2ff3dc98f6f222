//! One block of memory for all buffers of a forward pass.
//!
//! A pass opens a [`Frame`] and takes its buffers in its first lines, which therefore are the memory
//! plan. The block only ever grows, so a second pass of the same size allocates nothing.

use crate::error::SessionError;
use bytemuck::{Pod, Zeroable};

/// Buffers begin at multiples of this: a cache line, and the widest vector.
const ALIGN: usize = 64;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGN]);

/// Memory of a session's forward passes.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    lines: Vec<Line>,
}

/// Bytes that `take` takes from a frame.
fn counted<'a, T>(take: impl Fn(&mut Frame<'a>) -> T) -> usize {
    let mut trial = Frame { rest: &mut [], counted: Some(0) };
    take(&mut trial);
    trial.counted.unwrap_or(0)
}

/// Bytes that `n` values of `T` take in a frame.
fn footprint<T>(n: usize) -> usize {
    (n * size_of::<T>()).next_multiple_of(ALIGN)
}

impl Arena {
    /// A frame with room for `bytes`, growing the block if it is too small.
    fn frame(&mut self, bytes: usize) -> Result<Frame<'_>, SessionError> {
        let n = bytes.div_ceil(ALIGN);
        if self.lines.len() < n {
            self.lines = Vec::new();
            self.lines = bytemuck::allocation::try_zeroed_vec(n)
                .map_err(|()| SessionError::OutOfMemory { what: "buffers", bytes: bytes as u64 })?;
        }
        Ok(Frame { rest: bytemuck::cast_slice_mut(&mut self.lines), counted: None })
    }

    /// What `take` takes from a frame, which is made large enough by letting `take` try first.
    pub(crate) fn plan<'a, T>(&'a mut self, take: impl Fn(&mut Frame<'a>) -> T) -> Result<T, SessionError> {
        Ok(take(&mut self.frame(counted(&take))?))
    }
}

/// What is left of an arena's block while a pass takes its buffers.
#[derive(Debug)]
pub(crate) struct Frame<'a> {
    rest: &'a mut [u8],
    /// In a trial, which hands out nothing, the bytes asked for.
    counted: Option<usize>,
}

impl<'a> Frame<'a> {
    /// The memory of what was taken by [`Frame::take_either`], for one of its plans.
    pub(crate) fn of(bytes: &'a mut [u8]) -> Frame<'a> {
        Frame { rest: bytes, counted: None }
    }

    /// Room for either of two plans, whose buffers are never needed at the same time.
    pub(crate) fn take_either<T, U>(
        &mut self,
        a: impl Fn(&mut Frame<'a>) -> T,
        b: impl Fn(&mut Frame<'a>) -> U,
    ) -> &'a mut [u8] {
        self.take(counted(a).max(counted(b)))
    }

    /// The next `n` values; their content is whatever the last pass left.
    ///
    /// # Panics
    /// If the frame was opened too small.
    pub(crate) fn take<T: Pod>(&mut self, n: usize) -> &'a mut [T] {
        if let Some(counted) = &mut self.counted {
            *counted += footprint::<T>(n);
            return &mut [];
        }
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(footprint::<T>(n));
        self.rest = rest;
        &mut bytemuck::cast_slice_mut(taken)[..n]
    }
}
