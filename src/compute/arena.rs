//! One block of memory for all buffers of a forward pass.
//!
//! A pass opens a [`Frame`] and takes its buffers in its first lines, which therefore are the
//! memory plan. The block only ever grows, so a second pass of the same size allocates nothing.

use crate::compute::ComputeError;
use bytemuck::{Pod, Zeroable};

/// Alignment of buffers: a cache line, and the widest vector.
const ALIGN: usize = 64;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGN]);

/// Memory of an engine's passes.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    lines: Vec<Line>,
}

/// Bytes that the buffers of `take` need in a frame.
pub(crate) fn counted<'a, T>(take: impl Fn(&mut Frame<'a>) -> T) -> usize {
    let mut trial = Frame {
        rest: &mut [],
        counted: Some(0),
    };
    take(&mut trial);
    trial.counted.unwrap_or(0)
}

/// Bytes that `n` values of `T` need in a frame.
fn footprint<T>(n: usize) -> usize {
    n.saturating_mul(size_of::<T>())
        .checked_next_multiple_of(ALIGN)
        .unwrap_or(usize::MAX)
}

impl Arena {
    /// Bytes of the block.
    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(&*self.lines) as u64
    }

    /// A frame with room for `bytes`, growing the block if it is too small.
    fn frame(&mut self, bytes: usize) -> Result<Frame<'_>, ComputeError> {
        let n = bytes.div_ceil(ALIGN);
        if self.lines.len() < n {
            self.lines = Vec::new();
            self.lines = bytemuck::allocation::try_zeroed_vec(n).map_err(|()| {
                ComputeError::OutOfMemory {
                    what: "buffers",
                    bytes: bytes as u64,
                }
            })?;
        }
        Ok(Frame {
            rest: bytemuck::cast_slice_mut(&mut self.lines),
            counted: None,
        })
    }

    /// Runs `take` on a frame that is large enough, after a trial run that counts its bytes.
    pub(crate) fn plan<'a, T>(
        &'a mut self,
        take: impl Fn(&mut Frame<'a>) -> T,
    ) -> Result<T, ComputeError> {
        Ok(take(&mut self.frame(counted(&take))?))
    }
}

/// The rest of an arena's block while a pass takes its buffers.
#[derive(Debug)]
pub(crate) struct Frame<'a> {
    rest: &'a mut [u8],
    /// In a trial run, which returns no memory, the bytes requested so far.
    counted: Option<usize>,
}

impl<'a> Frame<'a> {
    /// A frame of memory that was taken as bytes, large enough for the largest of several plans.
    pub(crate) fn of(bytes: &'a mut [u8]) -> Frame<'a> {
        Frame {
            rest: bytes,
            counted: None,
        }
    }

    /// The next `n` values; their content is whatever the last pass left.
    ///
    /// # Panics
    /// If the frame is too small.
    pub(crate) fn take<T: Pod>(&mut self, n: usize) -> &'a mut [T] {
        if let Some(counted) = &mut self.counted {
            *counted = counted.saturating_add(footprint::<T>(n));
            return &mut [];
        }
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(footprint::<T>(n));
        self.rest = rest;
        &mut bytemuck::cast_slice_mut(taken)[..n]
    }
}

/// Reserves memory for `n` values in total.
pub(crate) fn reserve<T>(
    values: &mut Vec<T>,
    n: usize,
    what: &'static str,
) -> Result<(), ComputeError> {
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    let more = n.saturating_sub(values.len());
    values
        .try_reserve_exact(more)
        .map_err(|_| ComputeError::OutOfMemory { what, bytes })
}

/// Reuses the memory of a list for what lives shorter.
pub(crate) fn reuse<T, U>(mut list: Vec<T>) -> Vec<U> {
    list.clear();
    list.into_iter()
        .map(|_| unreachable!("the list is empty"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buffers of a pass: 3 values, 100 values, and either 5 or 70 values.
    fn buffers<'a>(f: &mut Frame<'a>) -> (&'a mut [f32], &'a mut [u64], &'a mut [u8]) {
        let either = [5, 70].map(|n| counted(|f| f.take::<f32>(n).len()));
        (f.take(3), f.take(100), f.take(either[0].max(either[1])))
    }

    #[test]
    fn buffers_are_aligned_and_disjoint() {
        let mut arena = Arena::default();
        for _ in 0..2 {
            let (a, b, c) = arena.plan(buffers).unwrap();
            assert_eq!((a.len(), b.len(), c.len()), (3, 100, 320));
            for address in [a.as_ptr().addr(), b.as_ptr().addr(), c.as_ptr().addr()] {
                assert_eq!(address % ALIGN, 0);
            }
            a.fill(1.0);
            b.fill(2);
            c.fill(3);
            let mut either = Frame::of(c);
            either.take::<f32>(70).fill(4.0);
            assert!(a.iter().all(|&a| a == 1.0) && b.iter().all(|&b| b == 2));
        }
    }

    #[test]
    fn a_second_pass_of_the_same_size_moves_nothing() {
        let mut arena = Arena::default();
        let first = arena.plan(|f| f.take::<f32>(1000)).unwrap().as_ptr();
        assert_eq!(arena.plan(|f| f.take::<f32>(1000)).unwrap().as_ptr(), first);
        assert_eq!(arena.plan(|f| f.take::<f32>(10)).unwrap().as_ptr(), first);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri ends where memory does")]
    fn memory_that_is_not_there_is_an_error() {
        // An unused allocation could be optimised away.
        let take = |f: &mut Frame<'_>| {
            std::hint::black_box(f.take::<u8>(isize::MAX as usize - 4096)).len()
        };
        let error = Arena::default().plan(take).unwrap_err();
        assert!(
            matches!(
                error,
                ComputeError::OutOfMemory {
                    what: "buffers",
                    ..
                }
            ),
            "{error}"
        );
    }
}
