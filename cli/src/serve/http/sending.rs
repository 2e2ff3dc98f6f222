//! Connections whose client has to go on reading: otherwise one that stops would keep its request,
//! and the end of the server, waiting for ever.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream that fails once nothing could be written for some time.
pub(crate) struct Sending<S> {
    stream: S,
    limit: Duration,
    /// Since when nothing could be written.
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<S> Sending<S> {
    pub(crate) fn new(stream: S, limit: Duration) -> Sending<S> {
        Sending {
            stream,
            limit,
            stuck: None,
        }
    }

    /// What became of an attempt to write, unless the time is over.
    fn watch(
        &mut self,
        cx: &mut Context<'_>,
        attempt: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if attempt.is_ready() {
            self.stuck = None;
            return attempt;
        }
        let limit = self.limit;
        ready!(
            self.stuck
                .get_or_insert_with(|| Box::pin(sleep(limit)))
                .as_mut()
                .poll(cx)
        );
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client reads nothing",
        )))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Sending<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Sending<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, attempt)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.watch(cx, attempt)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::time::Instant;

    /// A client that reads a byte at each of `reads`, in milliseconds, and nothing behind them.
    struct Client {
        begun: Instant,
        reads: Vec<u64>,
    }

    impl AsyncWrite for Client {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            match self.reads.first() {
                Some(&ms) if self.begun.elapsed() >= Duration::from_millis(ms) => {
                    self.reads.remove(0);
                    Poll::Ready(Ok(1))
                }
                _ => Poll::Pending,
            }
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Only who reads nothing for all of the time is sent away, not who reads slowly.
    #[test]
    fn whoever_reads_stays() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let (limit, begun) = (Duration::from_millis(400), Instant::now());
        let mut stream = Sending::new(
            Client {
                begun,
                reads: vec![0, 250, 500, 750],
            },
            limit,
        );
        let mut write = async || {
            // The client wakes nobody.
            let mut retry = tokio::time::interval(Duration::from_millis(10));
            poll_fn(|cx| {
                while retry.poll_tick(cx).is_ready() {}
                Pin::new(&mut stream).poll_write(cx, b"ab")
            })
            .await
        };
        runtime.block_on(async {
            for i in 0..4 {
                assert_eq!(write().await.unwrap(), 1, "byte {i}");
            }
            let last = begun.elapsed();
            assert_eq!(write().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
            assert!(begun.elapsed() - last >= limit);
        });
    }
}
