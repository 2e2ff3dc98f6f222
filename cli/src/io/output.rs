//! What leaves the program: failures and their exit codes, text, progress.

use ruvllm::gguf::Writer;
use ruvllm::{DecodeError, GgufError, GradientError, LearnError, SessionError};
use std::any::Any;
use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Why a subcommand did not end well.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The call was wrong.
    Usage(String),
    /// The work failed.
    Work(String),
    /// Whoever reads the output has enough of it.
    Closed,
    /// The user pressed Ctrl-C, or the system asked the program to end.
    Interrupted,
}

impl Failure {
    /// Says it on stderr; the exit code.
    pub(crate) fn report(self) -> ExitCode {
        let (message, code) = match self {
            Failure::Usage(message) => (
                format!("{message}\n\nFor more information, try '--help'."),
                2,
            ),
            Failure::Work(message) => (message, 1),
            Failure::Closed => return ExitCode::SUCCESS,
            // What a shell reports of a program that was ended by SIGINT.
            Failure::Interrupted => return ExitCode::from(130),
        };
        let message = printable(&message);
        let label = if color(&io::stderr()) {
            "\x1b[1;31merror:\x1b[0m"
        } else {
            "error:"
        };
        let _ = writeln!(io::stderr(), "{label} {message}");
        ExitCode::from(code)
    }

    /// What it says, without a label.
    #[cfg(feature = "pull")]
    pub(crate) fn into_text(self) -> String {
        match self {
            Failure::Usage(text) | Failure::Work(text) => text,
            Failure::Closed | Failure::Interrupted => "interrupted".into(),
        }
    }

    /// A file that could not be read or written.
    pub(crate) fn file(path: &Path) -> impl Fn(io::Error) -> Failure + '_ {
        move |error| match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::Closed,
            _ => Failure::Work(format!("{}: {error}", path.display())),
        }
    }
}

/// What happens to an output that exists.
#[derive(clap::Args)]
pub(crate) struct OverwriteArg {
    /// Replace the output if it exists
    #[arg(long, alias = "force")]
    overwrite: bool,
}

impl OverwriteArg {
    /// Refuses, before any work, to replace a file that is not to be replaced.
    pub(crate) fn check(&self, output: &Path) -> Result<(), Failure> {
        check_overwrite(output, self.overwrite)
    }

    /// Lets the file be replaced, if the user said so.
    pub(crate) fn apply(&self, writer: &mut Writer<'_>) {
        if self.overwrite {
            writer.overwrite();
        }
    }
}

/// Refuses to replace `output`, if it exists, unless `overwrite` is given.
pub(crate) fn check_overwrite(output: &Path, overwrite: bool) -> Result<(), Failure> {
    if !output.exists() || overwrite {
        return Ok(());
    }
    let exists = GgufError::Exists {
        path: output.to_owned(),
    };
    Err(Failure::Work(format!("{exists}: --overwrite asks for it")))
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Failure {
        let any = &error as &dyn Any;
        let broken_pipe = any
            .downcast_ref()
            .is_some_and(|e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe);
        match (broken_pipe, is_cancelled(any)) {
            (true, _) => Failure::Closed,
            (_, true) => Failure::Interrupted,
            _ if any.is::<ruvllm::arch::ArchError>() => {
                Failure::Work(format!("RUVLLM_ARCH: {error}"))
            }
            _ => Failure::Work(error.to_string()),
        }
    }
}

/// Whether an error of the library says that a call was cancelled.
fn is_cancelled(error: &dyn Any) -> bool {
    let session = match error.downcast_ref() {
        Some(ruvllm::Error::Session(error)) => Some(error),
        _ => None,
    };
    let decode = match error.downcast_ref() {
        Some(DecodeError::Session(error)) => Some(error),
        _ => None,
    };
    let learn = match error.downcast_ref() {
        Some(LearnError::Session(error) | LearnError::Gradient(GradientError::Session(error))) => {
            Some(error)
        }
        _ => None,
    };
    let cancelled = error.downcast_ref().or(session).or(decode).or(learn);
    matches!(cancelled, Some(SessionError::Cancelled))
}

/// `text` as it can be shown: what comes from a file could otherwise command the terminal, or fill
/// it. Keeps line ends.
pub(crate) fn printable(text: &str) -> String {
    /// Characters shown of the beginning and of the end of a line.
    const SHOWN: usize = 1000;
    let lines = text.split('\n').map(|line| {
        let line = line.replace(char::is_control, "\u{fffd}");
        let n = line.chars().count();
        if n <= 2 * SHOWN {
            return line;
        }
        let (head, tail) = (line.chars().take(SHOWN), line.chars().skip(n - SHOWN));
        head.chain(" … ".chars()).chain(tail).collect()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether to use colours on a stream.
pub(crate) fn color(stream: &impl IsTerminal) -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal()
        && !set("NO_COLOR")
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// `text` in the colours of an ANSI code on stderr, if it has colours.
pub(crate) fn paint(code: &str, text: &str) -> String {
    if color(&io::stderr()) {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// Writes to stdout at once.
pub(crate) fn print(bytes: impl AsRef<[u8]>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes.as_ref())
        .and_then(|()| out.flush())
        .map_err(Failure::file(Path::new("standard output")))
}

/// Prints a JSON value and a line end.
pub(crate) fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(format!("{value:#}\n"))
}

/// A line for the user on stderr.
pub(crate) fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Seconds since 1970; 0 where the clock is before that.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

/// Milliseconds below which 50, 95 and 99 of a hundred times are; nothing of no times.
pub(crate) fn percentiles(times: &[Duration]) -> Vec<f64> {
    let mut times = times.to_vec();
    times.sort_unstable();
    let percents: &[usize] = if times.is_empty() { &[] } else { &[50, 95, 99] };
    percents
        .iter()
        .map(|p| milliseconds(times[(times.len() * p).div_ceil(100) - 1]))
        .collect()
}

/// [`percentiles`] as a cell.
pub(crate) fn slashes(times: &[f64]) -> String {
    times
        .iter()
        .map(|time| format!("{time:.1}"))
        .collect::<Vec<_>>()
        .join("/")
}

/// Milliseconds to the microsecond.
pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// A number of bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.2} {}", UNITS[unit])
    }
}

/// A number of parameters for people.
pub(crate) fn count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

/// A bar on a terminal for work that takes over a second; nothing otherwise. It is drawn by a
/// thread of its own, since a single step of the work may take longer than that.
pub(crate) struct Progress {
    shared: Arc<Shared>,
    painter: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    done: AtomicU64,
    ended: Mutex<bool>,
    wake: Condvar,
}

impl Progress {
    pub(crate) fn new(what: &'static str, total: u64) -> Progress {
        let shared = Arc::<Shared>::default();
        let painter = io::stderr().is_terminal().then(|| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.paint(what, total))
        });
        Progress { shared, painter }
    }

    /// One that shows nothing: what is printed tells how far the work is.
    pub(crate) fn hidden() -> Progress {
        Progress {
            shared: Arc::default(),
            painter: None,
        }
    }

    pub(crate) fn set(&self, done: u64) {
        self.shared.done.store(done, Ordering::Relaxed);
    }
}

impl Shared {
    fn paint(&self, what: &'static str, total: u64) {
        let start = Instant::now();
        let mut wait = Duration::from_secs(1);
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            ended = self
                .wake
                .wait_timeout(ended, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            if !*ended {
                let line = bar(
                    what,
                    self.done.load(Ordering::Relaxed),
                    total,
                    start.elapsed(),
                );
                let _ = write!(io::stderr(), "\r{line}\x1b[K");
                wait = Duration::from_millis(200);
            }
        }
        // Only a bar that was drawn is wiped off.
        if wait < Duration::from_secs(1) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// `what`, 30 characters of bar, percent and seconds.
fn bar(what: &str, done: u64, total: u64, elapsed: Duration) -> String {
    const WIDTH: u64 = 30;
    let done = done.min(total);
    let share = |n| u128::from(done) * u128::from(n) / u128::from(total.max(1));
    let filled = "#".repeat(share(WIDTH) as usize);
    format!(
        "{what} [{filled:<30}] {:>3} % {} s",
        share(100),
        elapsed.as_secs()
    )
}

impl Drop for Progress {
    fn drop(&mut self) {
        *self
            .shared
            .ended
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.wake.notify_all();
        if let Some(painter) = self.painter.take() {
            // A painter that panicked has nothing to say about the work.
            let _ = painter.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fill() {
        let bar = |done, total| bar("loading", done, total, Duration::from_secs(7));
        assert_eq!(bar(0, 8), format!("loading [{}]   0 % 7 s", " ".repeat(30)));
        assert_eq!(
            bar(4, 8),
            format!("loading [{}{}]  50 % 7 s", "#".repeat(15), " ".repeat(15))
        );
        assert_eq!(bar(9, 8), format!("loading [{}] 100 % 7 s", "#".repeat(30)));
        assert_eq!(bar(0, 0), format!("loading [{}]   0 % 7 s", " ".repeat(30)));
    }
}
