//! Where the server listens: an address of the network, or a socket in the file system.

#[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
use crate::serve::http::tls::Encrypted;
use std::io;
use std::net::SocketAddr;
#[cfg(unix)]
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
#[cfg(unix)]
use std::path::PathBuf;
use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
use tokio_rustls::TlsAcceptor;

/// A client's connection.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

/// What connections come from, before there is a runtime.
pub(crate) enum Bound {
    Net(std::net::TcpListener, SocketAddr),
    #[cfg(unix)]
    File(StdUnixListener, PathBuf),
}

/// The path of a socket, if `host` names one: `unix:PATH`, or a path that ends in `.sock`.
#[cfg(unix)]
fn socket_path(host: &str) -> Option<&str> {
    host.strip_prefix("unix:")
        .or_else(|| Some(host).filter(|host| host.ends_with(".sock")))
}

impl Bound {
    pub(crate) fn new(host: &str, port: u16) -> io::Result<Bound> {
        #[cfg(unix)]
        if let Some(path) = socket_path(host) {
            let path = PathBuf::from(path);
            // What a server that was killed has left behind, if nobody answers there.
            let is_left = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            if StdUnixStream::connect(&path).is_err_and(is_left) {
                std::fs::remove_file(&path)?;
            }
            let listener = StdUnixListener::bind(&path)?;
            listener.set_nonblocking(true)?;
            return Ok(Bound::File(listener, path));
        }
        // Addresses of IPv6 are written in brackets where a port follows.
        let name = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        let listener = std::net::TcpListener::bind((name, port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Bound::Net(listener, address))
    }

    /// Whether only programs of this machine reach it.
    pub(crate) fn is_local(&self) -> bool {
        match self {
            Bound::Net(_, address) => address.ip().is_loopback(),
            #[cfg(unix)]
            Bound::File(..) => true,
        }
    }

    /// Where clients find it.
    pub(crate) fn label(&self, is_encrypted: bool) -> String {
        match self {
            Bound::Net(_, address) if is_encrypted => format!("https://{address}"),
            Bound::Net(_, address) => format!("http://{address}"),
            #[cfg(unix)]
            Bound::File(_, path) => format!("unix:{}", path.display()),
        }
    }
}

/// The same within a runtime.
pub(crate) struct Listener {
    sockets: Sockets,
    #[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
    tls: Option<TlsAcceptor>,
}

enum Sockets {
    Net(tokio::net::TcpListener),
    #[cfg(unix)]
    File {
        listener: tokio::net::UnixListener,
        _file: Remove,
    },
}

/// Removes the file of a socket when it is dropped.
#[cfg(unix)]
pub(crate) struct Remove(PathBuf);

#[cfg(unix)]
impl Drop for Remove {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Listener {
    pub(crate) fn new(bound: Bound) -> io::Result<Listener> {
        let sockets = match bound {
            Bound::Net(listener, _) => Sockets::Net(tokio::net::TcpListener::from_std(listener)?),
            #[cfg(unix)]
            Bound::File(listener, path) => Sockets::File {
                listener: tokio::net::UnixListener::from_std(listener)?,
                _file: Remove(path),
            },
        };
        Ok(Listener {
            sockets,
            #[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
            tls: None,
        })
    }

    /// The same, whose connections `tls` encrypts, if it is there.
    #[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
    pub(crate) fn encrypted(self, tls: Option<TlsAcceptor>) -> Listener {
        Listener { tls, ..self }
    }

    pub(crate) async fn accept(&self) -> io::Result<Box<dyn Socket>> {
        let stream: Box<dyn Socket> = match &self.sockets {
            Sockets::Net(listener) => {
                let (stream, _) = listener.accept().await?;
                // Tokens are sent one by one.
                let _ = stream.set_nodelay(true);
                Box::new(stream)
            }
            #[cfg(unix)]
            Sockets::File { listener, .. } => Box::new(listener.accept().await?.0),
        };
        #[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
        if let Some(tls) = &self.tls {
            return Ok(Box::new(Encrypted::new(tls, stream)));
        }
        Ok(stream)
    }
}
