//! `ruvllm health`: whether a server answers, for images of containers that have no `curl`.

use crate::io::{Failure, print};
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Most time for connecting, and between two pieces of the answer.
const TIMEOUT: Duration = Duration::from_secs(4);
/// Most bytes of the answer.
const MAX_BYTES: u64 = 64 << 10;

const EXAMPLES: &str = "\
Examples:
  ruvllm health                       of the server on this machine, at the usual port
  ruvllm health --port 9000 && echo up

Exit codes: 0 it can answer requests, 1 it cannot. A server with TLS or on a socket of the file system is not \
asked.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Address of the server
    #[arg(
        long,
        value_name = "HOST",
        default_value = "127.0.0.1",
        env = "LLAMA_ARG_HOST"
    )]
    host: String,
    /// Its port
    #[arg(long, value_name = "N", default_value_t = 8080, env = "LLAMA_ARG_PORT")]
    port: u16,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let Args { host, port } = args;
    let failed = |error: std::io::Error| Failure::Work(format!("{host}:{port}: {error}"));
    let answer = answer(host, *port).map_err(failed)?;
    let status = answer.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) == Some("200") {
        return print("ok\n");
    }
    Err(Failure::Work(format!("{host}:{port} answers {status:?}")))
}

/// What the server says to a question for its health.
fn answer(host: &str, port: u16) -> std::io::Result<String> {
    let mut last = std::io::Error::other("no address of this name");
    for address in (host, port).to_socket_addrs()? {
        let mut stream = match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(stream) => stream,
            Err(error) => {
                last = error;
                continue;
            }
        };
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        write!(
            stream,
            "GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        )?;
        let mut bytes = Vec::new();
        stream.take(MAX_BYTES).read_to_end(&mut bytes)?;
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    Err(last)
}
