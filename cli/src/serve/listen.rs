//! The socket: connections are accepted until the program is asked to end, then what was asked is
//! answered.

use super::app::Loader;
use super::args::ServerArgs;
use super::blocking::MAX_BLOCKING;
use super::http::sending::Sending;
use super::http::socket::{Bound, Listener};
use super::models::Shared;
use super::observe::log;
use super::preset::entries;
use super::routes::router;
use crate::io::{Failure, on_interrupt};
use axum::Router;
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, watch as channel};

/// Connections at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 4096;
/// Bytes of a request's head that are read together; a head has at most twice as many.
const HEAD: usize = 32 << 10;
/// Most time until a new connection has sent the headers of a request, if `--timeout` is not less.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Most time from an answer to the headers of the next request on its connection: pools of clients
/// keep idle connections.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

/// Serves until the program is asked to end.
pub(crate) fn listen(args: ServerArgs) -> Result<(), Failure> {
    args.log.start()?;
    let listener = Bound::new(&args.host, args.port).map_err(|error| {
        Failure::Work(format!(
            "cannot listen on {}:{}: {error}",
            args.host, args.port
        ))
    })?;
    #[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
    let tls = args.tls.acceptor()?;
    #[cfg(not(all(feature = "tls", not(any(windows, target_vendor = "apple")))))]
    let tls: Option<()> = None;
    let address = listener.label(tls.is_some());
    let args = Arc::new(args);
    let shared = Shared::new(entries(&args)?, Loader::new(Arc::clone(&args), true)?);
    if !listener.is_local() && shared.keys.is_empty() {
        args.log.say(format!(
            "warning: {address} is reached by others, and no --api-key is set"
        ));
    }
    let (stop, stopped) = channel::channel(0u32);
    let interrupt = stop.clone();
    on_interrupt(move || interrupt.send_modify(|n| *n += 1))?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime
        .worker_threads(2)
        .max_blocking_threads(MAX_BLOCKING)
        .thread_keep_alive(Duration::from_secs(2));
    let runtime = runtime.enable_all().build()?;
    let (failed, failure) = mpsc::channel();
    let (of_loader, to) = (Arc::clone(&args), shared.clone());
    let loader = move || match to.models.start() {
        Ok(names) => {
            let names = match names.is_empty() {
                true => "the server".to_owned(),
                false => names.join(", "),
            };
            of_loader.log.say(format!("{names} is ready on {address}"));
        }
        Err(end) => {
            let _ = failed.send(end);
            stop.send_modify(|n| *n += 2);
        }
    };
    // Its end is not awaited: it may take as long as the download of a model.
    std::thread::Builder::new()
        .name("loader".into())
        .spawn(loader)?;
    runtime.spawn(Arc::clone(&shared.models).unload_idle());
    let router = router(shared.clone());
    let listener = move || {
        let listener = Listener::new(listener)?;
        #[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
        let listener = listener.encrypted(tls);
        Ok(listener)
    };
    runtime.block_on(serve(listener, router, stopped, &args))?;
    // Streams that nobody reads any more end with it.
    runtime.shutdown_timeout(Duration::from_secs(1));
    shared.models.loader().into_iter().for_each(Loader::flush);
    for app in shared.models.all_loaded() {
        app.keep_measured();
    }
    match failure.try_recv() {
        Ok(failure) => Err(failure),
        Err(_) if shared.models.are_starting() => Err(Failure::Interrupted),
        Err(_) => Ok(()),
    }
}

/// Serves connections until `stopped`, then answers what was asked; the second time it ends at
/// once.
async fn serve(
    listener: impl FnOnce() -> std::io::Result<Listener>,
    router: Router,
    mut stopped: channel::Receiver<u32>,
    args: &ServerArgs,
) -> Result<(), Failure> {
    let listener = listener()?;
    let (graceful, permits) = (
        GracefulShutdown::new(),
        Arc::new(Semaphore::new(MAX_CONNECTIONS)),
    );
    let http = http_builder();
    loop {
        let accept = async {
            let permit = Arc::clone(&permits).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) =
            match select(pin!(accept), pin!(stopped.wait_for(|&n| n > 0))).await {
                Either::Left((accepted, _)) => accepted,
                Either::Right(_) => break,
            };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                // Most often there are no descriptors left, for a while.
                tracing::warn!(target: log::HTTP, %error, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let asked = Arc::new(Notify::new());
        let (service, begins) = (TowerToHyperService::new(router.clone()), Arc::clone(&asked));
        let service = service_fn(move |request| {
            begins.notify_one();
            service.call(request)
        });
        let limit = Duration::from_secs_f64(args.timeout);
        let stream = TokioIo::new(Sending::new(stream, limit));
        let connection = graceful.watch(http.serve_connection(stream, service));
        tokio::spawn(async move {
            let mut connection = pin!(connection);
            let first = tokio::time::timeout(limit.min(HEADER_TIMEOUT), asked.notified());
            if let Either::Right((Ok(()), _)) = select(connection.as_mut(), pin!(first)).await {
                // A client that went away is no failure of the server.
                let _ = connection.await;
            }
            drop(permit);
        });
    }
    drop(listener);
    if *stopped.borrow() < 2 {
        args.log
            .say("shutting down: finishing running requests (signal again to stop now)");
        select(
            pin!(graceful.shutdown()),
            pin!(stopped.wait_for(|&n| n > 1)),
        )
        .await;
    }
    Ok(())
}

/// How connections are served.
pub(super) fn http_builder() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_buf_size(HEAD);
    http
}
