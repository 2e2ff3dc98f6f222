//! Work that takes longer than a moment, on threads for it.

use super::http::error::ApiError;
use ruvllm::CancelToken;

/// Threads for what takes longer than a moment.
pub(super) const MAX_BLOCKING: usize = 32;

/// Runs blocking work on the blocking thread pool.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::internal(error.to_string())))
}

/// Cancels when dropped, with the handler whose client went away.
pub(crate) struct CancelOnDrop(pub(crate) CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
