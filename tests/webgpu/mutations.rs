//! Shaders with a bug put in, each of which a check has to notice: `wgpu`'s validation, or the case
//! that tests the kernel.

use crate::passes::{joined_like_single, joined_models};
use ruvllm::gpu::check::{CASES, Checker};
use ruvllm::gpu::kernels::FORMATS;
use ruvllm::gpu::webgpu::shaders::FILES;
use ruvllm::gpu::webgpu::{Device, DeviceStage};

/// A change of a shader: the first `from` after `anchor` becomes `to`.
#[derive(Debug, Default)]
struct Mutation {
    line: usize,
    file: String,
    case: String,
    format: String,
    anchor: String,
    from: String,
    to: String,
}

/// Instead of a case: passes with joined calls against those with single ones.
const JOINED: &str = "joined";

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
                let words: Vec<&str> = line.split(' ').collect();
                let [file, case, format] = words[..] else {
                    panic!("mutations.txt:{}", i + 1)
                };
                all.push(Mutation {
                    line: i + 1,
                    file: file.to_string(),
                    case: case.to_string(),
                    format: format.to_string(),
                    ..Mutation::default()
                });
            }
        }
    }
    all
}

/// What is noticed of a mutation, or `None` if it passes as correct.
fn report(m: &Mutation, device: &Device) -> Option<String> {
    let (_, text) = FILES
        .iter()
        .find(|(name, _)| *name == m.file)
        .unwrap_or_else(|| panic!("mutations.txt:{}: file", m.line));
    let find = |what: &str, after: usize| {
        let found = text[after..].find(what).map(|at| at + after);
        found.unwrap_or_else(|| panic!("mutations.txt:{}: no `{what}`", m.line))
    };
    let from = find(&m.from, find(&m.anchor, 0));
    let mutated = format!("{}{}{}", &text[..from], m.to, &text[from + m.from.len()..]);
    device.change_shaders(vec![(m.file.clone(), mutated)]);
    if m.case == JOINED {
        let mut models = joined_models().into_iter();
        return models.find_map(|model| joined_like_single(device, &model).err());
    }
    let case = CASES
        .iter()
        .find(|c| c.name == m.case)
        .unwrap_or_else(|| panic!("mutations.txt:{}: case", m.line));
    let format = FORMATS
        .iter()
        .find(|f| f.to_string().to_lowercase() == m.format);
    let formats = format.map_or(&[][..], std::slice::from_ref);
    device.force_lanes(32);
    let mut stage = DeviceStage::new(device, 2);
    (case.run)(&mut Checker::new(&mut stage, formats, false)).err()
}

/// Runs every `step`-th of them, those of joined calls and of cooperative matrices on `offered`; fails
/// with a list of those that were missed.
pub(crate) fn run(device: &Device, offered: &Device, step: usize) {
    let all = mutations();
    assert!(all.len() >= 100, "{} mutations", all.len());
    for case in CASES {
        assert!(
            all.iter().any(|m| m.case == case.name),
            "no mutation for {}",
            case.name
        );
    }
    let mut missed = Vec::new();
    for m in all.iter().step_by(step) {
        let has_matrices = offered.info().matrix.is_some();
        let device = match (m.case == JOINED, m.file == "matrix") {
            (_, true) if !has_matrices => {
                println!("{}:{} SKIPPED: no matrices", m.file, m.line);
                continue;
            }
            (false, false) => device,
            _ => offered,
        };
        let report = report(m, device);
        device.change_shaders(Vec::new());
        let line = report.as_deref().and_then(|report| report.lines().next());
        println!("{}:{} {}", m.file, m.line, line.unwrap_or("nothing"));
        if report.is_none() {
            missed.push(format!("{m:?}"));
        }
    }
    assert!(
        missed.is_empty(),
        "{} of {} were missed:\n{}",
        missed.len(),
        all.len(),
        missed.join("\n")
    );
}
