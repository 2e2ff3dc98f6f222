//! The audit log: a file to which every request that was computed appends a line of JSON.
//!
//! The scheduler's thread only puts a line into a bounded queue; another thread writes them, 100 at
//! a time or what came within a second. Lines that find the queue full, or cannot be written, are
//! counted.

use crate::io::{Failure, milliseconds, parse_size, reason_name};
use crate::serve::ids::Caller;
use prometheus_client::metrics::counter::Counter;
use ruvllm::Finish;
use ruvllm::scheduler::RequestId;
use ruvllm::scheduler::ScheduleError;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Lines that may wait to be written.
const MAX_WAITING: usize = 10_000;
/// Lines that are written at once.
const BATCH: usize = 100;
/// Most time that a line waits for others.
const DELAY: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
#[command(next_help_heading = "Logs")]
pub(crate) struct AuditLogArgs {
    /// Append a line of JSON per request to this file: who asked, counts of tokens, times, how it
    /// ended
    #[arg(long, alias = "witness-log", value_name = "FILE")]
    audit_log: Option<PathBuf>,
    /// Write the prompts into it, too
    #[arg(long, alias = "witness-prompts", requires = "audit_log")]
    audit_prompts: bool,
    /// Wait for the disk after each write
    #[arg(long, alias = "witness-fsync", requires = "audit_log")]
    audit_fsync: bool,
    /// Size at which the file becomes FILE.1, and FILE.1 FILE.2
    #[arg(long, alias = "witness-size", value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    audit_size: u64,
    /// Older files that are kept
    #[arg(long, alias = "witness-keep", value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=999))]
    audit_keep: u32,
}

impl AuditLogArgs {
    /// Opens the log, if there shall be one. `dropped` counts lines that are not in it.
    pub(crate) fn open(&self, dropped: &Counter) -> Result<Option<AuditLog>, Failure> {
        let Some(path) = &self.audit_log else {
            return Ok(None);
        };
        let mut log = LogFile {
            path: path.clone(),
            file: append(path).map_err(Failure::file(path))?,
            max_size: self.audit_size,
            n_older: self.audit_keep,
            syncs: self.audit_fsync,
        };
        log.end_torn_line().map_err(Failure::file(path))?;
        let (queue, lines) = sync_channel(MAX_WAITING);
        let counter = dropped.clone();
        std::thread::Builder::new()
            .name("audit-log".into())
            .spawn(move || write(log, &lines, &counter))?;
        let requests = Arc::default();
        Ok(Some(AuditLog {
            requests,
            queue,
            dropped: dropped.clone(),
            with_prompts: self.audit_prompts,
        }))
    }
}

/// A handle; clones are of the same log.
#[derive(Clone)]
pub(crate) struct AuditLog {
    requests: Arc<Mutex<HashMap<RequestId, Pending>>>,
    queue: SyncSender<Message>,
    dropped: Counter,
    pub(crate) with_prompts: bool,
}

enum Message {
    Line(String),
    /// Write what is there, then answer.
    Flush(SyncSender<()>),
}

/// What is known of a request that has no line yet.
#[derive(Default)]
struct Pending {
    queued: Option<Instant>,
    /// Time until it was first computed.
    waited: Option<Duration>,
    n_preempted: u32,
    /// What its handler tells.
    description: Option<Map<String, Value>>,
    /// What the scheduler tells in the end.
    outcome: Option<Map<String, Value>>,
}

impl AuditLog {
    /// The same log for another model, whose scheduler counts requests from 0, too.
    pub(crate) fn of_model(&self) -> AuditLog {
        AuditLog {
            requests: Arc::default(),
            ..self.clone()
        }
    }

    /// Changes what is known of a request; once both sides have told all, writes its line.
    fn change(&self, id: RequestId, change: impl FnOnce(&mut Pending)) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let pending = requests.entry(id).or_default();
        change(pending);
        let Pending {
            description: Some(description),
            outcome: Some(outcome),
            ..
        } = pending
        else {
            return;
        };
        let mut line = std::mem::take(description);
        line.append(outcome);
        requests.remove(&id);
        drop(requests);
        if self
            .queue
            .try_send(Message::Line(Value::Object(line).to_string()))
            .is_err()
        {
            self.dropped.inc();
        }
    }

    /// Says whose request it is and what it asks for. May come after its end.
    pub(crate) fn describe(&self, id: RequestId, caller: &Caller, model: &str, mut more: Value) {
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let mut line = Map::new();
        line.insert("time".into(), json!(time.as_millis() as f64 / 1e3));
        line.insert("request".into(), json!(&*caller.request));
        line.insert("id".into(), json!(id.0));
        line.insert("path".into(), json!(&*caller.path));
        line.insert("tenant".into(), json!(&*caller.tenant));
        line.insert("model".into(), json!(model));
        line.extend(
            more.as_object_mut()
                .map(std::mem::take)
                .into_iter()
                .flatten(),
        );
        self.change(id, |pending| pending.description = Some(line));
    }

    pub(crate) fn queued(&self, id: RequestId, _n_prompt: usize) {
        self.change(id, |pending| pending.queued = Some(Instant::now()));
    }

    pub(crate) fn admitted(&self, id: RequestId) {
        self.change(id, |pending| {
            let queued = pending.queued;
            pending.waited = pending.waited.or_else(|| Some(queued?.elapsed()));
        });
    }

    pub(crate) fn preempted(&self, id: RequestId) {
        self.change(id, |pending| pending.n_preempted += 1);
    }

    pub(crate) fn ended(&self, id: RequestId, outcome: Result<&Finish, &ScheduleError>) {
        self.change(id, |pending| {
            let ms = |time: Option<Duration>| time.map(milliseconds);
            let mut told = json!({
                "waited_ms": ms(pending.waited),
                "total_ms": ms(pending.queued.map(|queued| queued.elapsed())),
                "n_preempted": pending.n_preempted,
            });
            match outcome {
                Ok(finish) => {
                    let timings = &finish.timings;
                    told["reason"] = reason_name(finish.reason).into();
                    told["n_prompt"] = finish.n_prompt.into();
                    told["n_cached"] = finish.n_cached.total().into();
                    told["n_generated"] = finish.n_generated.into();
                    told["first_token_ms"] = milliseconds(timings.first_token).into();
                    told["prompt_ms"] = milliseconds(timings.prefill).into();
                    told["decode_ms"] = milliseconds(timings.decode).into();
                }
                Err(error) => told["error"] = error.to_string().into(),
            }
            pending.outcome = told.as_object_mut().map(std::mem::take);
        });
    }

    /// Waits until what is there is written, a few seconds at most.
    pub(crate) fn flush(&self) {
        let (done, wait) = sync_channel(1);
        if self.queue.try_send(Message::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(Duration::from_secs(5));
        }
    }
}

/// Opens a file that only its owner reads.
fn append(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).read(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

struct LogFile {
    path: PathBuf,
    file: File,
    max_size: u64,
    n_older: u32,
    syncs: bool,
}

impl LogFile {
    /// Ends a line of which a part was written when the machine or the disk failed.
    fn end_torn_line(&mut self) -> io::Result<()> {
        let mut last = [b'\n'];
        if self.file.metadata()?.len() > 0 {
            self.file.seek(SeekFrom::End(-1))?;
            self.file.read_exact(&mut last)?;
        }
        if last == *b"\n" {
            Ok(())
        } else {
            self.file.write_all(b"\n")
        }
    }

    fn write(&mut self, lines: &str) -> io::Result<()> {
        self.end_torn_line()?;
        let size = self.file.metadata()?.len();
        if size > 0 && size.saturating_add(lines.len() as u64) > self.max_size {
            self.rotate()?;
        }
        self.file.write_all(lines.as_bytes())?;
        if self.syncs {
            self.file.sync_data()
        } else {
            Ok(())
        }
    }

    /// Puts the file behind a new one, and drops the oldest.
    fn rotate(&mut self) -> io::Result<()> {
        let older = |i: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{i}"));
            PathBuf::from(name)
        };
        for i in (1..self.n_older).rev() {
            match std::fs::rename(older(i), older(i + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        std::fs::rename(&self.path, older(1))?;
        self.file = append(&self.path)?;
        Ok(())
    }
}

/// Loop of the thread that writes.
fn write(mut log: LogFile, queue: &Receiver<Message>, dropped: &Counter) {
    let (mut lines, mut n, mut first) = (String::new(), 0, Instant::now());
    loop {
        let next = match n {
            0 => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            _ => queue.recv_timeout(DELAY.saturating_sub(first.elapsed())),
        };
        let (mut done, mut is_over) = (None, false);
        match next {
            Ok(Message::Line(line)) => {
                if n == 0 {
                    first = Instant::now();
                }
                lines += &line;
                lines.push('\n');
                n += 1;
                if n < BATCH {
                    continue;
                }
            }
            Ok(Message::Flush(sender)) => done = Some(sender),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => is_over = true,
        }
        if n > 0
            && let Err(error) = log.write(&lines)
        {
            dropped.inc_by(n as u64);
            tracing::error!(path = %log.path.display(), %error, n, "lines of the audit log are lost");
        }
        (lines, n) = (String::new(), 0);
        // Who waits no more has gone.
        done.map(|done| done.try_send(()));
        if is_over {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(folder: &Path, size: u64) -> AuditLogArgs {
        AuditLogArgs {
            audit_log: Some(folder.join("log")),
            audit_prompts: false,
            audit_fsync: false,
            audit_size: size,
            audit_keep: 2,
        }
    }

    fn caller() -> Caller {
        Caller {
            request: "r".into(),
            path: "/".into(),
            tenant: "".into(),
        }
    }

    /// Both sides of request `i` tell, the handler last if `late`.
    fn tell(audit_log: &AuditLog, i: u64, late: bool) {
        let (id, error) = (RequestId(i), ScheduleError::Ended);
        let describe = || audit_log.describe(id, &caller(), "m", json!({}));
        if !late {
            describe();
        }
        audit_log.queued(id, 1);
        audit_log.admitted(id);
        audit_log.ended(id, Err(&error));
        if late {
            describe();
        }
    }

    #[test]
    fn whoever_tells_last_writes_and_files_rotate() {
        let folder =
            std::env::temp_dir().join(format!("ruvllm-audit-log-unit-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let dropped = Counter::default();
        let audit_log = args(&folder, 1).open(&dropped).unwrap().unwrap();
        for i in 0..4 {
            tell(&audit_log, i, i % 2 == 0);
            audit_log.flush();
        }
        assert!(
            audit_log.requests.lock().unwrap().is_empty(),
            "nothing is kept of what has its line"
        );
        let id = |name: &str| -> Value {
            let text = std::fs::read_to_string(folder.join(name)).unwrap();
            serde_json::from_str::<Value>(text.trim_end()).unwrap()["id"].clone()
        };
        assert_eq!(
            [id("log"), id("log.1"), id("log.2")],
            [3, 2, 1].map(Value::from)
        );
        assert!(!folder.join("log.3").exists() && dropped.get() == 0);
        // Windows keeps files that are open.
        drop(audit_log);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_full_queue_drops_lines_and_counts_them() {
        let (queue, lines) = sync_channel(2);
        let dropped = Counter::default();
        let audit_log = AuditLog {
            requests: Arc::default(),
            queue,
            dropped: dropped.clone(),
            with_prompts: false,
        };
        (0..5).for_each(|i| tell(&audit_log, i, false));
        assert_eq!((dropped.get(), lines.try_iter().count()), (3, 2));
    }
}
