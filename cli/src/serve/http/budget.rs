//! What the bodies of all requests may take together.

use super::error::ApiError;
use crate::io::size;
use axum::http::StatusCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What each request may take whatever the others have: those with large bodies cannot keep small
/// ones out.
const FREE: usize = 64 << 10;

/// Memory for what all requests together hold of their bodies, beyond [`FREE`] for each.
pub(in crate::serve) struct Budget {
    max: usize,
    used: AtomicUsize,
}

impl Budget {
    pub(in crate::serve) fn new(max: usize) -> Arc<Budget> {
        Arc::new(Budget {
            max,
            used: AtomicUsize::new(0),
        })
    }
}

/// A request's part of the budget, which is given back when it is dropped.
///
/// It grows with what really came, so that announcing a large body takes nothing. Nobody waits for
/// room: whoever finds none is refused, so that bodies of which a part is there cannot block one
/// another.
pub(in crate::serve) struct Share {
    budget: Arc<Budget>,
    size: usize,
    /// What of it counts.
    counted: usize,
}

impl Share {
    pub(in crate::serve) fn of(budget: &Arc<Budget>) -> Share {
        Share {
            budget: Arc::clone(budget),
            size: 0,
            counted: 0,
        }
    }

    pub(in crate::serve) fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let new_size = self.size.saturating_add(bytes);
        let (counted, max) = (new_size.saturating_sub(FREE), self.budget.max);
        if counted > max {
            return Err(too_large(format!(
                "the request alone takes more than the {} for all",
                size(max as u64)
            )));
        }
        let more = counted - self.counted;
        let with_more = |used: usize| used.checked_add(more).filter(|&used| used <= max);
        if self
            .budget
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_more)
            .is_err()
        {
            let message = format!(
                "the requests that are being read take more than {} now",
                size(max as u64)
            );
            return Err(ApiError::new(
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_error",
                message,
            ));
        }
        (self.size, self.counted) = (new_size, counted);
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

pub(in crate::serve) fn too_large(message: String) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "invalid_request_error",
        message,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_ones_always_find_room() {
        let budget = Budget::new(100);
        let (mut first, mut second) = (Share::of(&budget), Share::of(&budget));
        first.grow(FREE).unwrap();
        first.grow(60).unwrap();
        second.grow(FREE + 40).unwrap();
        let status =
            |share: &mut Share, n| share.grow(n).unwrap_err().json()["error"]["code"].clone();
        assert_eq!(status(&mut second, 1), 429, "others have the rest");
        assert_eq!(status(&mut second, 61), 413, "it would never find room");
        assert_eq!(status(&mut second, usize::MAX), 413);
        Share::of(&budget).grow(FREE).unwrap();
        drop(first);
        second.grow(60).unwrap();
        drop(second);
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }
}
