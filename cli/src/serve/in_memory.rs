//! The server without sockets: what clients send and read are bytes in memory. The fuzzer
//! (`fuzz/fuzz_targets/serve.rs`) calls it.

use super::app::Loader;
use super::args::ServerArgs;
use super::listen::http_builder;
use super::models::Shared;
use super::preset::entries;
use super::routes::router;
use crate::io::Failure;
use axum::Router;
use clap::{Args as _, Command, FromArgMatches};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::runtime::{Builder, Runtime};

/// A server that runs in this process.
pub struct InMemory {
    runtime: Runtime,
    service: TowerToHyperService<Router>,
}

impl InMemory {
    /// The server that these flags of `ruvllm serve` describe.
    ///
    /// # Errors
    /// What the program would say.
    pub fn start(flags: &[&str]) -> Result<InMemory, String> {
        let start = || {
            let command = ServerArgs::augment_args(Command::new("serve")).no_binary_name(true);
            let args = ServerArgs::from_arg_matches(&command.try_get_matches_from(flags)?)?;
            let args = Arc::new(args);
            let shared = Shared::new(entries(&args)?, Loader::new(Arc::clone(&args), false)?);
            shared.models.start()?;
            let runtime = Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            Ok(InMemory {
                runtime,
                service: TowerToHyperService::new(router(shared)),
            })
        };
        start().map_err(|failure: Failure| format!("{failure:?}"))
    }

    /// What a client reads on a connection to which it writes `sent` and no more.
    pub fn answer(&self, sent: &[u8]) -> Vec<u8> {
        let mut socket = Socket {
            sent,
            answer: Vec::new(),
        };
        // Clients that read no more are gone; this one still reads.
        let connection = http_builder()
            .half_close(true)
            .serve_connection(&mut socket, self.service.clone());
        // Bytes that are no request are answered, too; then the connection ends with an error.
        let _ = self.runtime.block_on(connection);
        socket.answer
    }
}

/// The server's side of a connection.
struct Socket<'a> {
    /// What was not read yet.
    sent: &'a [u8],
    answer: Vec<u8>,
}

impl Read for Socket<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let (now, rest) = self.sent.split_at(self.sent.len().min(buffer.remaining()));
        buffer.put_slice(now);
        self.sent = rest;
        Poll::Ready(Ok(()))
    }
}

impl Write for Socket<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.answer.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
