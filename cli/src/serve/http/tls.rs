//! Connections that are encrypted (`--ssl-key-file`, `--ssl-cert-file`).
//!
//! The handshake is part of the first bytes that are read or written, so that it has the time that
//! a new connection has for its first request, and keeps nobody else waiting.

use crate::io::Failure;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

/// The server's key and certificate.
#[derive(clap::Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct TlsArgs {
    /// File with the key of the certificate, in PEM: connections are encrypted then
    #[arg(
        long,
        value_name = "FILE",
        env = "LLAMA_ARG_SSL_KEY_FILE",
        requires = "ssl_cert_file"
    )]
    ssl_key_file: Option<PathBuf>,
    /// File with the server's certificate, and those that vouch for it, in PEM
    #[arg(
        long,
        value_name = "FILE",
        env = "LLAMA_ARG_SSL_CERT_FILE",
        requires = "ssl_key_file"
    )]
    ssl_cert_file: Option<PathBuf>,
}

impl TlsArgs {
    /// What encrypts connections, if they shall be.
    pub(crate) fn acceptor(&self) -> Result<Option<TlsAcceptor>, Failure> {
        let files = self.ssl_key_file.as_ref().zip(self.ssl_cert_file.as_ref());
        files
            .map(|(key, certificates)| acceptor(key, certificates))
            .transpose()
    }
}

/// Reads a certificate with those that vouch for it, and its key, from files in PEM.
fn acceptor(key: &Path, certificates: &Path) -> Result<TlsAcceptor, Failure> {
    let wrong = |path: &Path, error: &dyn std::fmt::Display| {
        Failure::Work(format!("{}: {error}", path.display()))
    };
    let chain = CertificateDer::pem_file_iter(certificates)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| wrong(certificates, &error))?;
    if chain.is_empty() {
        return Err(wrong(certificates, &"there is no certificate in it"));
    }
    let of_key = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(key, &error))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(chain, of_key))
        .map_err(|error| wrong(key, &error))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// An encrypted connection, which may be in its handshake.
pub(crate) enum Encrypted<S> {
    // Large, and one for each connection.
    Begins(Box<Accept<S>>),
    Goes(Box<TlsStream<S>>),
}

impl<S: AsyncRead + AsyncWrite + Unpin> Encrypted<S> {
    pub(crate) fn new(acceptor: &TlsAcceptor, stream: S) -> Encrypted<S> {
        Encrypted::Begins(Box::new(acceptor.accept(stream)))
    }

    /// The connection behind its handshake.
    fn poll_begun(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut TlsStream<S>>>> {
        if let Encrypted::Begins(accept) = self {
            let stream = ready!(Pin::new(accept).poll(cx))?;
            *self = Encrypted::Goes(Box::new(stream));
        }
        Poll::Ready(match self {
            Encrypted::Goes(stream) => Ok(Pin::new(&mut **stream)),
            Encrypted::Begins(_) => Err(io::ErrorKind::NotConnected.into()),
        })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Encrypted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_begun(cx))?.poll_read(cx, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Encrypted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_begun(cx))?.poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_begun(cx))?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A client that never began has nothing to be told.
        match &*self {
            Encrypted::Begins(_) => Poll::Ready(Ok(())),
            Encrypted::Goes(_) => ready!(self.poll_begun(cx))?.poll_shutdown(cx),
        }
    }
}
