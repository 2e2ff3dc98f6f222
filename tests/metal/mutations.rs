//! Shaders with a bug put in, each of which has to be caught by the detector that is meant for it.

use crate::emulator::{Build, Emulator, build_one};
use crate::shaders;
use ruvllm::gpu::check::{CASES, Checker};
use ruvllm::gpu::kernels::FORMATS;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A change of a shader: the first `from` after `anchor` becomes `to`.
#[derive(Debug, Default)]
struct Mutation {
    line: usize,
    file: String,
    case: String,
    format: String,
    /// The detector: how its reports begin, or `types` for what does not compile.
    detector: String,
    anchor: String,
    from: String,
    to: String,
}

/// Reads `mutations.txt`, which begins with the description of its form.
fn mutations() -> Vec<Mutation> {
    let mut all: Vec<Mutation> = Vec::new();
    for (i, line) in include_str!("mutations.txt").lines().enumerate() {
        let (kind, rest) = line.split_at(line.len().min(2));
        match kind {
            "- " => all.last_mut().unwrap().from = rest.to_string(),
            "+ " => all.last_mut().unwrap().to = rest.to_string(),
            "@ " => all.last_mut().unwrap().anchor = rest.to_string(),
            _ if line.starts_with('#') || line.is_empty() => {}
            _ => {
                let (what, detector) = line
                    .split_once(": ")
                    .unwrap_or_else(|| panic!("mutations.txt:{}", i + 1));
                let words: Vec<&str> = what.split(' ').collect();
                let [file, case, format] = words[..] else {
                    panic!("mutations.txt:{}", i + 1)
                };
                all.push(Mutation {
                    line: i + 1,
                    file: file.to_string(),
                    case: case.to_string(),
                    format: format.to_string(),
                    detector: detector.to_string(),
                    ..Mutation::default()
                });
            }
        }
    }
    all
}

/// What the detectors say of a mutation, or `None` if it passes as correct.
fn report(m: &Mutation, text: &str) -> Option<String> {
    let at = text
        .find(&m.anchor)
        .unwrap_or_else(|| panic!("mutations.txt:{}: no `{}`", m.line, m.anchor));
    let from = text[at..]
        .find(&m.from)
        .unwrap_or_else(|| panic!("mutations.txt:{}: no `{}`", m.line, m.from))
        + at;
    let mutated = format!("{}{}{}", &text[..from], m.to, &text[from + m.from.len()..]);
    let case = CASES
        .iter()
        .find(|c| c.name == m.case)
        .unwrap_or_else(|| panic!("mutations.txt:{}: case", m.line));
    let types = m.detector == "types";
    let change = Some((m.file.as_str(), mutated.as_str()));
    let program = match build_one(
        case.source,
        Build {
            change,
            format: Some(&m.format),
            types,
            counted: false,
        },
    ) {
        Ok(_) if types => return None,
        Ok(program) => program,
        Err(e) => return Some(format!("types: {e}")),
    };
    let format = FORMATS
        .iter()
        .find(|f| f.to_string().to_lowercase() == m.format);
    let mut gpu = Emulator::start(&program);
    (case.run)(&mut Checker::new(
        &mut gpu,
        format.map_or(&[][..], std::slice::from_ref),
        false,
    ))
    .err()
}

/// Runs all of them; fails with a list of those that were missed.
pub(crate) fn run() {
    let (all, files) = (
        mutations(),
        [shaders::files("metal"), shaders::files("h")].concat(),
    );
    assert!(all.len() >= 60, "{} mutations", all.len());
    for case in CASES {
        assert!(
            all.iter().any(|m| m.case == case.name),
            "no mutation for {}",
            case.name
        );
    }
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let work = || {
        let mut missed = Vec::new();
        loop {
            let Some(m) = all.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return missed;
            };
            let (_, text) = files.iter().find(|(file, _)| *file == m.file).unwrap();
            let report = report(m, text);
            let caught = report.as_ref().is_some_and(|report| {
                m.detector
                    .split(" or ")
                    .any(|d| report.starts_with(d) || report.contains(&format!(": {d}")))
            });
            println!(
                "{}:{} {}",
                m.file,
                m.line,
                report
                    .as_deref()
                    .unwrap_or("nothing")
                    .lines()
                    .next()
                    .unwrap_or("")
            );
            if !caught {
                missed.push(format!(
                    "{m:?}: {}",
                    report.unwrap_or("nothing was reported".to_string())
                ));
            }
        }
    };
    let missed: Vec<String> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    });
    assert!(
        missed.is_empty(),
        "{} of {} were missed:\n{}",
        missed.len(),
        all.len(),
        missed.join("\n")
    );
}
