//! Tables of digests: what is computed, and how it is compared.

use super::sha256::sha256;
use crate::common::{emulated, long, skipped};
use crate::run::OnLevel;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::arch::Arch;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Prompt tokens per pass.
const CHUNKS: [usize; 3] = [1, 7, 64];
/// Of the cases that the default run leaves out, one in so many runs all the same.
const SAMPLE: u64 = 8;

/// A model and how its sessions are set up.
pub(super) struct Job {
    pub(super) name: String,
    pub(super) options: SessionOptions,
    pub(super) open: Box<dyn Fn() -> Model + Sync>,
}

/// A model on a level, in chunks of a size.
pub(super) struct Case<'a> {
    pub(super) name: &'a str,
    pub(super) model: &'a Model,
    pub(super) options: SessionOptions,
    pub(super) n_threads: usize,
}

/// A result's name and bytes; none if the model does not have it, or refuses it.
pub(super) type Item = (&'static str, Option<Vec<u8>>);

/// Results that are computed together.
pub(super) struct Group {
    pub(super) compute: fn(&Case<'_>) -> Vec<Item>,
    /// Whether the default run computes them for every model on every level, in chunks of 7.
    pub(super) always: bool,
}

type Line = (String, String, usize);

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Table {
    /// Digest of values of the C library's functions.
    library: String,
    lines: BTreeMap<Line, BTreeMap<String, String>>,
}

impl Table {
    fn parse(text: &str) -> Table {
        let mut table = Table::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split(' ');
            let mut next = || {
                words
                    .next()
                    .unwrap_or_else(|| panic!("a line is cut off: {line}"))
                    .to_owned()
            };
            match next() {
                first if first == "library" => table.library = next(),
                model => {
                    let (level, chunks) = (next(), next());
                    let items: Vec<_> = words.map(|item| item.split_once(':').unwrap()).collect();
                    for chunk in chunks.split(',') {
                        let key = (model.clone(), level.clone(), chunk.parse().unwrap());
                        let items = items
                            .iter()
                            .map(|(name, digest)| ((*name).to_owned(), (*digest).to_owned()));
                        table.lines.entry(key).or_default().extend(items);
                    }
                }
            }
        }
        table
    }

    fn text(&self) -> String {
        let mut text =
            "# Made and compared by tests/it/digests: model, level, chunks, digests.\n".to_owned();
        writeln!(text, "library {}", self.library).unwrap();
        // Chunks change hardly any result: those with the same digest share a line.
        let mut chunks_of: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for ((model, level, chunk), items) in &self.lines {
            for item in items {
                chunks_of
                    .entry((model, level, item))
                    .or_default()
                    .push(chunk.to_string());
            }
        }
        let mut lines: BTreeMap<_, String> = BTreeMap::new();
        for ((model, level, (name, digest)), chunks) in chunks_of {
            let line = lines.entry((model, level, chunks.join(","))).or_default();
            write!(line, " {name}:{digest}").unwrap();
        }
        for ((model, level, chunks), items) in lines {
            writeln!(text, "{model} {level} {chunks}{items}").unwrap();
        }
        text
    }

    fn add(&mut self, line: Line, items: impl IntoIterator<Item = Item>) {
        let digest = |bytes: Option<Vec<u8>>| {
            bytes.map_or("-".to_owned(), |bytes| sha256(&bytes)[..16].to_owned())
        };
        let items = items
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), digest(bytes)));
        self.lines.entry(line).or_default().extend(items);
    }

    /// What `found` has that is not here, or is something else here.
    fn differences(&self, found: &Table) -> Vec<String> {
        let mut all = Vec::new();
        for (line, items) in &found.lines {
            for (name, digest) in items {
                let expected = self.lines.get(line).and_then(|items| items.get(name));
                if expected != Some(digest) {
                    let (model, level, chunk) = line;
                    let expected = expected.map_or("nothing", String::as_str);
                    all.push(format!("{model}, {level}, chunks of {chunk}, {name}: {digest} instead of {expected}"));
                }
            }
        }
        all
    }

    /// Adds what only `found` has.
    fn complete(&mut self, found: &Table) {
        for (line, items) in &found.lines {
            let here = self.lines.entry(line.clone()).or_default();
            for (name, digest) in items {
                here.entry(name.clone()).or_insert_with(|| digest.clone());
            }
        }
    }

    fn has_level(&self, name: &str) -> bool {
        self.lines.keys().any(|(_, level, _)| level == name)
    }

    fn models(&self) -> BTreeSet<&str> {
        self.lines
            .keys()
            .map(|(model, ..)| model.as_str())
            .collect()
    }
}

/// The digest of what the C library's functions give for numbers of all magnitudes that models
/// have.
fn library() -> String {
    let mut bytes = Vec::new();
    for i in 0..20_000 {
        let x = (i - 10_000) as f32 * 0.001_953;
        let positive = x.abs() + 1e-3;
        for y in [
            x.exp(),
            x.exp2(),
            x.sin(),
            (1000.0 * x).cos(),
            x.tanh(),
            positive.ln(),
            positive.ln_1p(),
        ] {
            bytes.extend(y.to_le_bytes());
        }
        bytes.extend(positive.powf(0.3 * x).to_le_bytes());
        let (x, positive) = (f64::from(x), f64::from(positive));
        for y in [
            x.exp(),
            x.sin(),
            x.cos(),
            x.tanh(),
            positive.ln(),
            positive.powf(0.3 * x),
        ] {
            bytes.extend(y.to_le_bytes());
        }
    }
    sha256(&bytes)[..16].to_owned()
}

/// The levels that are compared: those of the CPU; under emulation, which is slow, the one that is
/// tested, and where digests are written, the one that `RUVLLM_ARCH` names, if it does.
fn levels_to_compare() -> Vec<Arch> {
    let is_named = super::writes() && std::env::var_os("RUVLLM_ARCH").is_some();
    if emulated() || is_named || cfg!(ruvllm_emulate_amx) {
        vec![crate::run::level()]
    } else {
        Arch::available().collect()
    }
}

/// Whether the default run has a case that it does not always have: by a hash (FNV-1a) of its name.
fn is_sampled(name: &str) -> bool {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
    });
    (hash >> 32).is_multiple_of(SAMPLE)
}

/// Of a model on a level; results do not depend on the number of threads.
fn compute(
    job: &Job,
    arch: Arch,
    groups: &[Group],
    everything: bool,
    n_threads: Option<usize>,
) -> Table {
    let mut table = Table::default();
    let model = std::cell::OnceCell::new();
    for (i, chunk) in CHUNKS.into_iter().enumerate() {
        for (j, group) in groups.iter().enumerate() {
            let always = group.always && chunk == 7;
            if everything
                || always
                || is_sampled(&format!("{} {} {chunk} {j}", job.name, arch.name()))
            {
                let model = model.get_or_init(|| (job.open)().on(arch));
                let options = SessionOptions {
                    n_batch: chunk,
                    ..job.options.clone()
                };
                let n_threads = n_threads.unwrap_or(1 + (i + j + job.name.len()) % 2);
                let items = (group.compute)(&Case {
                    name: &job.name,
                    model,
                    options,
                    n_threads,
                });
                table.add((job.name.clone(), arch.name().to_owned(), chunk), items);
            }
        }
    }
    table
}

/// Computes digests on all cores and compares them with those of a file.
pub(super) fn check(file: &str, groups: &[Group], jobs: Vec<Job>) {
    let path = format!("{}/tests/data/digests/{file}", env!("CARGO_MANIFEST_DIR"));
    let writes = super::writes();
    let n_all = jobs.len();
    let jobs: Vec<Job> = jobs
        .into_iter()
        .filter(|job| super::wants(&job.name))
        .collect();
    let everything = writes || long();
    let mut expected = match std::fs::read_to_string(&path) {
        Ok(text) => Table::parse(&text),
        Err(_) if writes => Table {
            library: library(),
            ..Table::default()
        },
        Err(e) => panic!("{path}: {e}"),
    };
    if expected.library != library() {
        return skipped(
            "exp, ln and their like have other bits in this system's C library than where the digests were made",
        );
    }
    let (mut tasks, mut levels) = (Vec::new(), Vec::new());
    for arch in levels_to_compare() {
        if writes || expected.has_level(arch.name()) {
            levels.push(arch.name());
            tasks.extend(jobs.iter().map(|job| (job, arch)));
        } else {
            skipped(&format!(
                "{file} has no digests of the level {}, which only a CPU with it can make",
                arch.name()
            ));
        }
    }
    let mut failures = Vec::new();
    for n_threads in if long() {
        vec![Some(1), Some(2)]
    } else {
        vec![None]
    } {
        let found = on_all_cores(&tasks, |(job, arch)| {
            compute(job, *arch, groups, everything, n_threads)
        });
        if writes {
            let before = expected.clone();
            expected.complete(&found);
            if expected != before {
                std::fs::write(&path, expected.text()).unwrap();
            }
            if jobs.len() < n_all {
                return;
            }
        }
        failures.extend(expected.differences(&found));
        if everything {
            failures.extend(missing(&expected, &found, &levels));
        }
        eprintln!(
            "{file}: {} digests",
            found.lines.values().map(BTreeMap::len).sum::<usize>()
        );
    }
    if !emulated() {
        let gone = expected
            .models()
            .into_iter()
            .filter(|model| jobs.iter().all(|job| job.name != *model));
        failures.extend(gone.map(|model| format!("{model}: there is no such model any more")));
    }
    assert!(
        failures.is_empty(),
        "{} differ from {file}:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

/// The tables of all tasks in one.
fn on_all_cores<T: Sync>(tasks: &[T], compute: impl Fn(&T) -> Table + Sync) -> Table {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Table::default()));
    let n_workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..n_workers {
            scope.spawn(|| {
                while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let table = compute(task);
                    found.lock().unwrap().lines.extend(table.lines);
                }
            });
        }
    });
    found.into_inner().unwrap()
}

/// What the file has of `levels` and was not computed.
fn missing(expected: &Table, found: &Table, levels: &[&str]) -> Vec<String> {
    let mut all = Vec::new();
    for (line, items) in expected
        .lines
        .iter()
        .filter(|((_, level, _), _)| levels.contains(&level.as_str()))
    {
        let (model, level, chunk) = line;
        let lacks = |name: &&String| {
            found
                .lines
                .get(line)
                .is_none_or(|items| !items.contains_key(*name))
        };
        all.extend(
            items
                .keys()
                .filter(lacks)
                .map(|name| format!("{model}, {level}, chunks of {chunk}, {name}: not computed")),
        );
    }
    all
}

/// One bit of one logit makes another digest, and the difference names the case; so does a line
/// that the table lacks.
#[test]
fn one_bit_is_noticed() {
    let model = crate::tiny::Tiny::Llama
        .model(ruvllm::quant::DType::F32)
        .on(Arch::scalar());
    let case = Case {
        name: "tiny",
        model: &model,
        options: SessionOptions::default(),
        n_threads: 1,
    };
    let items = (super::passes::GROUPS[0].compute)(&case);
    let line = ("tiny".to_owned(), "scalar".to_owned(), 7);
    let table = |items: &[Item]| {
        let mut table = Table {
            library: library(),
            ..Table::default()
        };
        table.add(line.clone(), items.iter().cloned());
        table
    };
    let expected = Table::parse(&table(&items).text());
    assert_eq!(expected, table(&items));
    assert!(expected.differences(&table(&items)).is_empty());
    let mut changed = items.clone();
    let logits = changed
        .iter_mut()
        .find(|(name, _)| *name == "logits")
        .unwrap()
        .1
        .as_mut()
        .unwrap();
    let middle = logits.len() / 8 * 4;
    logits[middle] ^= 1;
    let differences = expected.differences(&table(&changed));
    assert_eq!(differences.len(), 1, "{differences:?}");
    assert!(
        differences[0].starts_with("tiny, scalar, chunks of 7, logits: "),
        "{differences:?}"
    );
    // A line or a result that the file lacks, and those that are not computed any more.
    let n = items.len();
    assert_eq!(Table::default().differences(&table(&items)).len(), n);
    assert_eq!(table(&items[1..]).differences(&table(&items)).len(), 1);
    assert_eq!(
        missing(&expected, &table(&items[1..]), &["scalar"]).len(),
        1
    );
    assert!(missing(&expected, &table(&items), &["scalar"]).is_empty());
}
