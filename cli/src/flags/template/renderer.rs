//! Rendering of chat templates by a process of its own, which is started again when it has ended.

use super::protocol::{inputs_to_json, outcome_from_json, read_frame, write_frame};
use super::worker::{COMMAND, memory_limit};
use crate::io::note;
use ruvllm::Tokenizer;
use ruvllm::chat::ChatError;
use ruvllm::chat::{ChatInputs, ChatTemplate, Rendered, render_guarded};
use serde_json::Value;
use std::io::{self, BufReader, BufWriter};
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that an answer may take: the process itself ends a rendering after ten seconds.
const MAX_TIME: Duration = Duration::from_secs(12);
/// Interval at which cancellation is checked.
const POLL: Duration = Duration::from_millis(20);

/// A chat template, and the process that renders it.
pub(crate) struct Renderer {
    source: String,
    place: Isolation,
}

/// Where templates are rendered.
enum Isolation {
    /// In a process, if it has been started and has not ended.
    Process(Mutex<Option<Worker>>),
    /// Here.
    Here(Box<ChatTemplate>),
}

impl Renderer {
    /// A template that a process of its own renders. If the system cannot start one, this process
    /// does, and a note says so.
    ///
    /// # Errors
    /// As [`ChatTemplate::parse`].
    pub(crate) fn new(source: &str) -> Result<Renderer, ChatError> {
        match Worker::start(source) {
            Ok(worker) => Ok(Renderer {
                source: source.to_owned(),
                place: Isolation::Process(Mutex::new(Some(worker?))),
            }),
            Err(error) => {
                note(format!(
                    "The chat template is rendered by this process, without a limit of memory: another one could not be started ({error})."
                ));
                Renderer::here(source)
            }
        }
    }

    /// A template that this process renders.
    ///
    /// # Errors
    /// As [`ChatTemplate::parse`].
    pub(crate) fn here(source: &str) -> Result<Renderer, ChatError> {
        Ok(Renderer {
            source: source.to_owned(),
            place: Isolation::Here(Box::new(ChatTemplate::parse(source)?)),
        })
    }

    /// The template's source.
    #[cfg(feature = "serve")]
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// [`ChatTemplate::render_fitted`].
    pub(crate) fn render(&self, inputs: &ChatInputs) -> Result<Rendered, ChatError> {
        self.render_unless(inputs, || false)
    }

    /// [`Renderer::render_unless`], and where messages of users and tools have texts of control
    /// tokens of `tokenizer`, or what `markers` finds, which are not to be parsed: ranges of bytes,
    /// in order.
    ///
    /// # Errors
    /// As [`Renderer::render_unless`].
    pub(crate) fn render_guarded(
        &self,
        inputs: &ChatInputs,
        tokenizer: Option<&Tokenizer>,
        markers: impl Fn(&str) -> Vec<Range<usize>>,
        cancelled: impl Fn() -> bool,
    ) -> Result<(Rendered, Vec<Range<usize>>), ChatError> {
        let control = |text: &str| {
            let known = tokenizer.map_or_else(Vec::new, |known| known.control_texts(text));
            union(known, markers(text))
        };
        render_guarded(inputs, &control, |inputs| {
            self.render_unless(inputs, &cancelled)
        })
    }

    /// [`Renderer::render`] that stops once `cancelled` returns `true`.
    ///
    /// # Errors
    /// As [`ChatTemplate::render_fitted`], [`ChatError::OutOfMemory`] if the process ends, and
    /// [`ChatError::Cancelled`].
    pub(crate) fn render_unless(
        &self,
        inputs: &ChatInputs,
        cancelled: impl Fn() -> bool,
    ) -> Result<Rendered, ChatError> {
        let process = match &self.place {
            Isolation::Here(template) => return template.render_fitted_unless(inputs, cancelled),
            Isolation::Process(process) => process,
        };
        let mut process = process.lock().unwrap_or_else(PoisonError::into_inner);
        let request = inputs_to_json(inputs);
        // A process may have ended since its last answer; one that has just started has not.
        let sent = process
            .take()
            .and_then(|mut worker| worker.send(&request).is_ok().then_some(worker));
        let worker = match sent {
            Some(worker) => worker,
            None => {
                let failed = |error: io::Error| ChatError::Render {
                    line: 0,
                    message: format!("no process renders the chat template: {error}"),
                };
                let mut worker = Worker::start(&self.source).map_err(failed)??;
                worker.send(&request).map_err(failed)?;
                worker
            }
        };
        let outcome = worker
            .wait(&cancelled)
            .unwrap_or_else(|| Err(out_of_memory()));
        // Otherwise it has ended, or goes on with what was given up, and is killed.
        let is_over = matches!(
            outcome,
            Err(ChatError::Cancelled | ChatError::OutOfTime { .. } | ChatError::OutOfMemory { .. })
        );
        *process = Some(worker).filter(|_| !is_over);
        outcome
    }
}

/// Ranges of either list, in order; those that overlap are one.
fn union(mut ranges: Vec<Range<usize>>, more: Vec<Range<usize>>) -> Vec<Range<usize>> {
    if more.is_empty() {
        return ranges;
    }
    ranges.extend(more);
    ranges.sort_by_key(|range| range.start);
    let mut all: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match all.last_mut().filter(|last| range.start < last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => all.push(range),
        }
    }
    all
}

/// A process that renders one template. It is killed when this is dropped.
struct Worker {
    process: Child,
    requests: BufWriter<ChildStdin>,
    answers: Receiver<io::Result<Value>>,
}

impl Worker {
    /// Starts a process, and waits until it has parsed the template.
    fn start(source: &str) -> io::Result<Result<Worker, ChatError>> {
        let mut command = Command::new(executable()?);
        command
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Where memory ends, Rust's run-time says so; the caller says it in other words.
            .stderr(Stdio::null());
        // Ctrl-C in a terminal is for the program alone.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut process = command.spawn()?;
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (stdin, stdout) = pipes.ok_or(io::ErrorKind::BrokenPipe)?;
        let (send, answers) = sync_channel(1);
        let mut worker = Worker {
            process,
            requests: BufWriter::new(stdin),
            answers,
        };
        std::thread::Builder::new()
            .name("template answers".into())
            .spawn(move || {
                let mut stdout = BufReader::new(stdout);
                loop {
                    let answer = read_frame(&mut stdout);
                    let is_last = answer.is_err();
                    if send.send(answer).is_err() || is_last {
                        break;
                    }
                }
            })?;
        let sent = worker.send(&Value::from(source)).ok();
        let parsed = sent.and_then(|()| worker.wait(&|| false));
        Ok(parsed
            .unwrap_or_else(|| Err(out_of_memory()))
            .map(|_| worker))
    }

    fn send(&mut self, value: &Value) -> io::Result<()> {
        write_frame(&mut self.requests, value)
    }

    /// The answer; `None` if the process has ended without one.
    fn wait(&self, cancelled: &impl Fn() -> bool) -> Option<Result<Rendered, ChatError>> {
        let begun = Instant::now();
        loop {
            match self.answers.recv_timeout(POLL) {
                Ok(answer) => return answer.ok().and_then(outcome_from_json),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) if cancelled() => {
                    return Some(Err(ChatError::Cancelled));
                }
                Err(RecvTimeoutError::Timeout) if begun.elapsed() > MAX_TIME => {
                    return Some(Err(ChatError::OutOfTime { limit: MAX_TIME }));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The error of a process that has ended: memory is what it may run out of.
fn out_of_memory() -> ChatError {
    ChatError::OutOfMemory {
        limit: memory_limit(),
    }
}

/// This program. Linux knows it even when its file was replaced since. (On Windows the same path may
/// lead to another program: Wine's.)
fn executable() -> io::Result<PathBuf> {
    let link = PathBuf::from("/proc/self/exe");
    if cfg!(any(target_os = "linux", target_os = "android")) && link.exists() {
        return Ok(link);
    }
    std::env::current_exe()
}
