//! Models of Hugging Face's hub, as the program fetches them: with notes and a progress bar.

use crate::io::{Failure, Progress, note, size};
use ruvllm::hub::{self, HubError, HubEvent, HubOptions, ModelName};
use std::cell::RefCell;
use std::path::PathBuf;

/// Path of the model that `-hf` names: of the one that is here, otherwise of the hub's.
pub(crate) fn resolve(name: &ModelName) -> Result<PathBuf, Failure> {
    with_notes(|on_event| hub::resolve(name, &HubOptions::default(), on_event))
}

/// Downloads a model, unless it is here; the path of its (first) file, or its folder.
pub(crate) fn fetch(name: &ModelName, options: &HubOptions) -> Result<PathBuf, Failure> {
    with_notes(|on_event| hub::fetch(name, options, on_event))
}

/// Runs `work` and tells what happens.
fn with_notes(
    work: impl FnOnce(&dyn Fn(HubEvent<'_>)) -> Result<PathBuf, HubError>,
) -> Result<PathBuf, Failure> {
    let bar: RefCell<Option<(String, Progress)>> = RefCell::new(None);
    let path = work(&|event| match event {
        HubEvent::Chosen { file, plan, memory } => note(format!(
            "{file} takes {} with {} tokens: the largest that fits into {}",
            size(plan.total()),
            plan.n_ctx,
            size(memory)
        )),
        HubEvent::Begins { file, bytes, part } => {
            *bar.borrow_mut() = None;
            let about = match part {
                (_, 1) => String::new(),
                (i, n) => format!(", file {} of {n}", i + 1),
            };
            note(format!("downloading {file} ({}{about})", size(bytes)));
        }
        HubEvent::Progress { file, done, bytes } => {
            let mut bar = bar.borrow_mut();
            match &mut *bar {
                Some((of, bar)) if of == file => bar.set(done),
                bar => {
                    let new = Progress::new("downloading", bytes);
                    bar.insert((file.to_owned(), new)).1.set(done);
                }
            }
        }
        HubEvent::Retries { why } => note(format!("{why}; trying again")),
        HubEvent::Left { file, why } => note(format!("{file} is left there: {why}")),
        _ => {}
    })?;
    Ok(path)
}
