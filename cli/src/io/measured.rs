//! What was measured of this machine, kept between runs in the user's cache folder: times of passes
//! by their number of rows, which say how much it pays to draft, speeds by number of threads, and
//! what `bench` read from memory per second. Nothing needs it: what is damaged, old or of another
//! version is ignored.

use super::terminal::note;
use super::time::{milliseconds, unix_time};
use ruvllm::Engine;
use ruvllm::Model;
use ruvllm::gguf::NewFile;
use serde_json::{Map, Value, json};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

/// Most bytes of the file.
const MAX_BYTES: u64 = 256 << 10;
/// Most entries that are kept; the oldest go.
const MAX_ENTRIES: usize = 64;
/// Seconds after which a measurement is too old.
const MAX_AGE: u64 = 30 * 24 * 3600;
/// Most rows of a pass, and most threads.
const MAX_COUNT: usize = 1024;

/// What was measured of a model on a level with so many threads.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    /// What people call the model.
    label: String,
    fingerprint: u64,
    level: String,
    n_threads: usize,
    /// Seconds since 1970.
    time: u64,
    /// Times of passes over so many generated rows.
    rows: Vec<(usize, Duration)>,
    /// Bytes that so many threads read from memory per second, if `bench` measured it.
    bandwidth: Option<f64>,
}

impl Entry {
    /// What `engine` has measured.
    fn of(engine: &Engine, label: &str, bandwidth: Option<f64>) -> Entry {
        let model = engine.model();
        Entry {
            label: label.to_owned(),
            fingerprint: model.fingerprint(),
            level: model.arch().name().to_owned(),
            n_threads: engine.n_threads(),
            time: unix_time(),
            rows: engine.row_times(),
            bandwidth,
        }
    }

    /// Whether it was measured of this model.
    pub(crate) fn is_of(&self, model: &Model) -> bool {
        self.fingerprint == model.fingerprint()
    }

    fn is_same(&self, other: &Entry) -> bool {
        let of = |entry: &Entry| (entry.fingerprint, entry.n_threads, entry.level.clone());
        of(self) == of(other)
    }

    /// For people.
    pub(crate) fn line(&self) -> String {
        let shown = self.rows.iter().filter(|(n, _)| n.is_power_of_two());
        let (rows, times): (Vec<_>, Vec<_>) = shown
            .map(|(n, time)| (n.to_string(), format!("{:.3}", milliseconds(*time))))
            .unzip();
        let when = match unix_time().saturating_sub(self.time) / (24 * 3600) {
            0 => "today".to_owned(),
            1 => "yesterday".to_owned(),
            days => format!("{days} days ago"),
        };
        let Entry {
            label,
            level,
            n_threads,
            ..
        } = self;
        let (rows, times) = (rows.join("/"), times.join("/"));
        let read = self.bandwidth.map_or(String::new(), |bytes| {
            format!(", {:.1} GB/s read from memory", bytes / 1e9)
        });
        format!(
            "{label} ({level}): best at -t {n_threads}, {rows} tokens in {times} ms{read}, {when}"
        )
    }

    /// Seconds of a pass over one row.
    fn plain(&self) -> Option<f64> {
        self.rows
            .iter()
            .find(|(n, _)| *n == 1)
            .map(|(_, time)| time.as_secs_f64())
    }

    pub(crate) fn json(&self) -> Value {
        let rows = self
            .rows
            .iter()
            .map(|(n, time)| (n.to_string(), (time.as_nanos() as f64 / 1e3).into()));
        json!({
            "model": self.label, "fingerprint": format!("{:016x}", self.fingerprint), "level": self.level,
            "threads": self.n_threads, "time": self.time, "rows_us": rows.collect::<Map<_, _>>(),
            "bandwidth": self.bandwidth,
        })
    }

    fn parse(value: &Value) -> Option<Entry> {
        let text = |key: &str| {
            value[key]
                .as_str()
                .filter(|text| text.len() < 4096)
                .map(str::to_owned)
        };
        let count = |n: usize| (1..=MAX_COUNT).contains(&n).then_some(n);
        let row = |(n, time): (&String, &Value)| {
            let time = time.as_f64().filter(|time| (0.1..1e9).contains(time))?;
            Some((count(n.parse().ok()?)?, Duration::from_secs_f64(time / 1e6)))
        };
        Some(Entry {
            label: text("model")?,
            fingerprint: u64::from_str_radix(&text("fingerprint")?, 16).ok()?,
            level: text("level")?,
            n_threads: count(usize::try_from(value["threads"].as_u64()?).ok()?)?,
            time: value["time"].as_u64()?,
            rows: value["rows_us"]
                .as_object()?
                .iter()
                .map(row)
                .collect::<Option<_>>()?,
            bandwidth: match &value["bandwidth"] {
                Value::Null => None,
                bytes => Some(bytes.as_f64().filter(|bytes| (1e6..1e15).contains(bytes))?),
            },
        })
    }
}

/// The file; none where there is no folder for it.
fn path() -> Option<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value: &OsString| !value.is_empty())
            .map(PathBuf::from)
    };
    let folder = variable("XDG_CACHE_HOME").or_else(|| variable("LOCALAPPDATA"));
    let folder = folder.or_else(|| Some(variable("HOME")?.join(".cache")))?;
    Some(folder.join("ruvllm").join("measured.json"))
}

/// What the system calls the CPU.
pub(crate) fn cpu_name() -> Option<String> {
    if cfg!(windows) {
        return std::env::var("PROCESSOR_IDENTIFIER").ok();
    }
    if cfg!(target_os = "macos") {
        let mut sysctl = std::process::Command::new("/usr/sbin/sysctl");
        let output = sysctl.args(["-n", "machdep.cpu.brand_string"]).output();
        return Some(String::from_utf8(output.ok()?.stdout).ok()?.trim().into());
    }
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
}

/// What a file of this version says of the machine.
fn machine() -> Value {
    json!({"version": env!("CARGO_PKG_VERSION"), "cpu": cpu_name()})
}

/// The entries that are fresh, or why there are none.
pub(crate) fn read() -> Result<Vec<Entry>, String> {
    let Some(path) = path() else {
        return Ok(Vec::new());
    };
    let Ok(file) = File::open(&path) else {
        return Ok(Vec::new());
    };
    let ignored = |why: &str| Err(format!("{}: {why}; ignored", path.display()));
    if !file
        .metadata()
        .is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MAX_BYTES)
    {
        return ignored("not a file of measurements");
    }
    let mut text = String::new();
    if file.take(MAX_BYTES).read_to_string(&mut text).is_err() {
        return ignored("not text");
    }
    let Ok(value) = serde_json::from_str::<Value>(&text) else {
        return ignored("not JSON");
    };
    if value["machine"] != machine() {
        return ignored("of another version, or another CPU");
    }
    let Some(entries) = value["entries"]
        .as_array()
        .filter(|entries| entries.len() <= MAX_ENTRIES)
    else {
        return ignored("without measurements");
    };
    let Some(entries) = entries.iter().map(Entry::parse).collect::<Option<Vec<_>>>() else {
        return ignored("damaged");
    };
    let now = unix_time();
    Ok(entries
        .into_iter()
        .filter(|entry| entry.time <= now && now - entry.time < MAX_AGE)
        .collect())
}

/// Gives `engine` what was measured of its model before.
pub(crate) fn assume(engine: &Engine) {
    match read() {
        Ok(entries) => {
            let own = Entry::of(engine, "", None);
            entries
                .iter()
                .filter(|entry| entry.is_same(&own))
                .for_each(|entry| engine.assume_row_times(&entry.rows));
        }
        Err(why) => note(why),
    }
}

/// Keeps what `engine` has measured, and the bandwidth, or that of before. What cannot be written
/// is not kept: a folder that is full or read-only is no reason to fail.
pub(crate) fn keep(engine: &Engine, label: &str, bandwidth: Option<f64>) {
    let (mut own, Some(path)) = (Entry::of(engine, label, bandwidth), path()) else {
        return;
    };
    if own.rows.is_empty() {
        return;
    }
    let mut entries = read().unwrap_or_default();
    let before = entries
        .iter()
        .find(|entry| entry.is_same(&own))
        .and_then(|entry| entry.bandwidth);
    own.bandwidth = own.bandwidth.or(before);
    entries.retain(|entry| !entry.is_same(&own));
    entries.push(own);
    entries.sort_by_key(|entry| entry.time);
    let kept = &entries[entries.len().saturating_sub(MAX_ENTRIES)..];
    let value =
        json!({"machine": machine(), "entries": kept.iter().map(Entry::json).collect::<Vec<_>>()});
    let Some(Ok(())) = path.parent().map(fs::create_dir_all) else {
        return;
    };
    // Without it the next run measures again.
    let _ = NewFile::create(&path, true).and_then(|mut file| {
        writeln!(file, "{value:#}")?;
        file.finish()
    });
}

/// Of each model that was measured, its number of threads and speed where it was fastest, and what
/// its passes took.
pub(crate) fn best(entries: Vec<Entry>) -> Vec<Entry> {
    let mut best: Vec<Entry> = Vec::new();
    for entry in entries.into_iter().filter(|entry| entry.plain().is_some()) {
        match best
            .iter_mut()
            .find(|other| other.fingerprint == entry.fingerprint && other.level == entry.level)
        {
            Some(other) if entry.plain() < other.plain() => *other = entry,
            Some(_) => {}
            None => best.push(entry),
        }
    }
    best
}
