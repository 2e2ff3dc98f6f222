//! Why a subcommand did not end well, and its exit code.

use super::terminal::{color, note, notes_are_told, printable};
use ruvllm::SessionError;
use ruvllm::decode::DecodeError;
use ruvllm::gguf::GgufError;
use ruvllm_learn::LearnError;
use ruvllm_learn::sona::SonaError;
use std::any::Any;
use std::error::Error;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

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
        if notes_are_told() {
            note(format!("error: {message}"));
            return ExitCode::from(code);
        }
        let label = if color(&io::stderr()) {
            "\x1b[1;31merror:\x1b[0m"
        } else {
            "error:"
        };
        let _ = writeln!(io::stderr(), "{label} {message}");
        ExitCode::from(code)
    }

    /// What it says, without a label.
    #[cfg(feature = "serve")]
    pub(crate) fn text(&self) -> &str {
        match self {
            Failure::Usage(text) | Failure::Work(text) => text,
            Failure::Closed | Failure::Interrupted => "interrupted",
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
            #[cfg(feature = "pull")]
            _ if matches!(any.downcast_ref(), Some(ruvllm::hub::HubError::Asked(_))) => {
                Failure::Usage(error.to_string())
            }
            _ => Failure::Work(error.to_string()),
        }
    }
}

/// Whether an error of the library says that a call was cancelled.
fn is_cancelled(error: &dyn Any) -> bool {
    use SessionError::Cancelled;
    fn is<E: 'static>(error: &dyn Any, test: impl Fn(&E) -> bool) -> bool {
        error.downcast_ref().is_some_and(test)
    }
    let learn = |e: &LearnError| matches!(e, LearnError::Session(Cancelled));
    is(error, |e: &SessionError| matches!(e, Cancelled))
        || is(error, |e: &ruvllm::Error| {
            matches!(e, ruvllm::Error::Session(Cancelled))
        })
        || is(error, |e: &DecodeError| {
            matches!(e, DecodeError::Session(Cancelled))
        })
        || is(error, learn)
        || is(error, |e: &SonaError| match e {
            SonaError::Session(error) => matches!(error, Cancelled),
            SonaError::Learn(error) => learn(error),
            _ => false,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruvllm::session::GradientError;

    #[test]
    fn what_was_cancelled_is_interrupted() {
        let interrupted = |failure: Failure| matches!(failure, Failure::Interrupted);
        let cancelled = || SessionError::Cancelled;
        assert!(interrupted(cancelled().into()));
        assert!(interrupted(ruvllm::Error::from(cancelled()).into()));
        assert!(interrupted(DecodeError::from(cancelled()).into()));
        assert!(interrupted(LearnError::from(cancelled()).into()));
        assert!(interrupted(
            SonaError::from(LearnError::from(cancelled())).into()
        ));
        // However it becomes the library's own error.
        let error = ruvllm::Error::from(GradientError::from(cancelled()));
        assert!(interrupted(error.into()));
        assert!(!interrupted(SessionError::NoTokens.into()));
    }
}
