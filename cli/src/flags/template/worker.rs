//! The process that renders chat templates: this program, called with [`COMMAND`] by itself.
//!
//! A template comes with a file from anywhere, and what it builds takes memory of whoever renders
//! it. This process may take so much and no more, and its end is nobody else's.

use super::protocol::{inputs_from_json, outcome_to_json, read_frame, write_frame};
use crate::io::Failure;
use ruvllm::SystemMemory;
use ruvllm::chat::ChatError;
use ruvllm::chat::{ChatTemplate, Rendered};
use std::io::{self, BufReader, BufWriter};

/// Name of the hidden command.
pub(super) const COMMAND: &str = "render-templates";
/// Address space of the process, most and least: a rendering reserves 256 MiB of it for a stack.
const MAX_MEMORY: u64 = 2 << 30;
const MIN_MEMORY: u64 = 1 << 30;

/// Memory that the process may take, where the system can limit it.
pub(super) fn memory_limit() -> u64 {
    let memory = SystemMemory::now().map_or(u64::MAX, |memory| {
        memory.limit.unwrap_or(u64::MAX).min(memory.total)
    });
    (memory / 4).clamp(MIN_MEMORY, MAX_MEMORY)
}

/// Answers the frames on stdin until it ends.
pub(crate) fn run() -> Result<(), Failure> {
    limit_memory()?;
    let (mut input, mut out) = (
        BufReader::new(io::stdin().lock()),
        BufWriter::new(io::stdout().lock()),
    );
    let source = read_frame(&mut input)?;
    let parsed = ChatTemplate::parse(source.as_str().unwrap_or_default());
    let (template, answer) = match parsed {
        Ok(template) => (Some(template), Ok(Rendered::default())),
        Err(error) => (None, Err(error)),
    };
    write_frame(&mut out, &outcome_to_json(answer))?;
    let Some(template) = template else {
        return Ok(());
    };
    loop {
        let inputs = match read_frame(&mut input) {
            Ok(json) => inputs_from_json(json),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let outcome = template.render_fitted(&inputs);
        let is_stuck = matches!(outcome, Err(ChatError::OutOfTime { .. }));
        write_frame(&mut out, &outcome_to_json(outcome))?;
        // The rendering still runs, and would keep a core busy.
        if is_stuck {
            return Ok(());
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn limit_memory() -> io::Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, most) = getrlimit(Resource::RLIMIT_AS)?;
    let limit = memory_limit().min(most);
    // No files of memory either if it ends.
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    Ok(setrlimit(Resource::RLIMIT_AS, limit, limit)?)
}

/// Other systems either have no such limit or do not enforce it.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn limit_memory() -> io::Result<()> {
    Ok(())
}
