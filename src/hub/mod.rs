//! Models by name, from Hugging Face's hub or already here.
//!
//! ```no_run
//! use ruvllm::Model;
//! use ruvllm::hub::{HubEvent, HubOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::from_hub("Qwen/Qwen3-0.6B-GGUF:Q8_0", &HubOptions::default(), &|event| {
//!     if let HubEvent::Progress { done, bytes, .. } = event {
//!         eprint!("\r{:3} %", 100 * done / bytes);
//!     }
//! })?;
//! # let _ = model.session()?;
//! # Ok(()) }
//! ```
//!
//! Files lie where Hugging Face's tools keep them, so each is downloaded once for all programs; a
//! download that broke off goes on where it was, and counts once its sum is that of the hub.
//! `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what
//! they mean there. A model's header comes first: one that this build cannot run is refused before
//! it is downloaded.

mod cache;
mod choice;
mod client;
mod error;
mod name;

use crate::engine::MemoryPlan;
use crate::gguf::Header;
use crate::model::Model;
pub use cache::{Cache, CachedFile};
use choice::{choose, group, has_word};
pub use client::tls;
use client::{Hub, HubFile, Listing};
pub use error::HubError;
pub use name::{ModelName, Revision};
use std::path::PathBuf;

/// Options of a look-up.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct HubOptions {
    /// Branch, tag or commit.
    pub revision: Revision,
    /// Hosts that files may come from, besides the hub's own.
    pub hosts: Vec<String>,
    /// Whether only what is here counts; so it does, too, where `HF_HUB_OFFLINE` is set.
    pub offline: bool,
}

/// Step of a download.
#[derive(Debug)]
#[non_exhaustive]
pub enum HubEvent<'a> {
    /// Model that is taken, as no type was asked for: the largest that fits.
    Chosen {
        /// Path in the repository.
        file: &'a str,
        /// What it takes.
        plan: &'a MemoryPlan,
        /// Bytes that it was to fit into.
        memory: u64,
    },
    /// Beginning of a file that is not here.
    Begins {
        /// Path in the repository.
        file: &'a str,
        /// Size of the whole file.
        bytes: u64,
        /// Its number among all files, from 0, and how many those are.
        part: (usize, usize),
    },
    /// Bytes of a file that are here now.
    Progress {
        /// Path in the repository.
        file: &'a str,
        /// Bytes that are here.
        done: u64,
        /// Size of the whole file.
        bytes: u64,
    },
    /// Connection that broke off and is made anew.
    Retries {
        /// Why it broke off.
        why: &'a HubError,
    },
    /// Projector for images that this build cannot use, and that stays there.
    Left {
        /// Path in the repository.
        file: &'a str,
        /// Why it cannot be used.
        why: &'a str,
    },
}

/// Header of a file on the hub.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteHeader {
    /// Path in the repository; of a split model that of the first part.
    pub file: String,
    /// The header; of a split model with the tensors of all parts.
    pub header: Header,
    /// Bytes of all parts.
    pub bytes: u64,
}

impl Model {
    /// Model of Hugging Face's hub, downloaded unless it is here: `OWNER/NAME`, or
    /// `OWNER/NAME:QUANT` for the file with that word in its name. Without one it is the largest that
    /// fits into memory.
    ///
    /// # Errors
    /// If there is no such model, here or there, if it cannot be downloaded, or as
    /// [`Model::open`].
    pub fn from_hub(
        name: &str,
        options: &HubOptions,
        on_event: &dyn Fn(HubEvent<'_>),
    ) -> Result<Model, HubError> {
        let path = resolve(&name.parse()?, options, on_event)?;
        Ok(Model::open(path)?)
    }
}

/// The hub, and what it has of a model, unless it is not to be asked.
fn ask(name: &ModelName, options: &HubOptions) -> Result<(Hub, Listing), HubError> {
    let variable = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
    let is_set = ["1", "ON", "YES", "TRUE"].contains(&variable.to_ascii_uppercase().as_str());
    if options.offline || is_set {
        let name = name.to_string();
        return Err(HubError::Offline { name });
    }
    let hub = Hub::new(&options.hosts)?;
    let listing = hub.list(&name.repo, &options.revision.0)?;
    Ok((hub, listing))
}

/// Files of a model that are here.
///
/// # Errors
/// If there are none.
pub fn find(name: &ModelName) -> Result<Vec<CachedFile>, HubError> {
    let mut models = Cache::open()?.models()?;
    models.retain(|m| m.repo == name.repo && matches(name, &m.file));
    if models.is_empty() {
        return Err(HubError::Asked(
            "there is no such model here: `ruvllm list` lists them".into(),
        ));
    }
    Ok(models)
}

fn matches(name: &ModelName, file: &str) -> bool {
    let quant = name.quant.as_deref();
    quant.is_none_or(|quant| has_word(file, quant))
}

/// Path of a model: of the one that is here, otherwise of the hub's, which is downloaded. A folder
/// if it is a checkpoint.
///
/// # Errors
/// If there is no such model, or it cannot be downloaded.
pub fn resolve(
    name: &ModelName,
    options: &HubOptions,
    on_event: &dyn Fn(HubEvent<'_>),
) -> Result<PathBuf, HubError> {
    let (cache, revision) = (Cache::open()?, &options.revision.0);
    let here = cache.newest(&name.repo, revision)?;
    let groups = group(here.into_iter().map(|m| (m.file.clone(), m)).collect());
    let mut groups: Vec<_> = groups
        .into_iter()
        .filter(|group| matches(name, &group.name))
        .collect();
    match groups.pop() {
        Some(group) if groups.is_empty() && group.is_whole => Ok(group.files[0].path.clone()),
        None if name.quant.is_none() => match cache.checkpoint(&name.repo, revision) {
            Some(folder) => Ok(folder),
            None => fetch(name, options, on_event),
        },
        _ => fetch(name, options, on_event),
    }
}

/// Downloads a model, unless it is here; the path of its (first) file, or of the folder of a
/// checkpoint in safetensors where there is no GGUF file.
///
/// # Errors
/// If there is no such model, it cannot be run here, or it cannot be downloaded.
pub fn fetch(
    name: &ModelName,
    options: &HubOptions,
    on_event: &dyn Fn(HubEvent<'_>),
) -> Result<PathBuf, HubError> {
    let (hub, listing) = ask(name, options)?;
    let cache = Cache::open()?;
    let (files, path) = match choose(&hub, &listing, name, on_event)? {
        Some(group) => {
            let path = cache.path(&listing, group.files[0]);
            (group.files, path)
        }
        None => (checkpoint(&listing, name)?, cache.snapshot(&listing)),
    };
    #[cfg(feature = "vision")]
    let files = [files, Vec::from_iter(projector(&hub, &listing, on_event))].concat();
    for (i, file) in files.iter().enumerate() {
        download(&hub, &cache, &listing, file, (i, files.len()), on_event)?;
    }
    cache.set_revision(&listing, &options.revision.0)?;
    Ok(path)
}

/// Header of a model on the hub; nothing else is read.
///
/// # Errors
/// If there is no such model, or several and no word to choose by.
pub fn header(name: &ModelName, options: &HubOptions) -> Result<RemoteHeader, HubError> {
    let (hub, listing) = ask(name, options)?;
    let files = listing.files.iter().map(|file| (file.path.clone(), file));
    let mut groups = group(files.collect());
    let all: String = groups.iter().map(|g| format!("\n  {}", g.name)).collect();
    groups.retain(|group| group.is_whole && matches(name, &group.name));
    let (Some(chosen), true) = (groups.pop(), groups.is_empty()) else {
        return Err(HubError::Asked(format!(
            "{name}: say which one, as in {}:Q4_K_M; these are there:{all}",
            name.repo
        )));
    };
    Ok(RemoteHeader {
        header: choice::header(&hub, &listing, &chosen)?,
        bytes: chosen.files.iter().map(|file| file.bytes).sum(),
        file: chosen.name,
    })
}

/// The files of a checkpoint.
fn checkpoint<'a>(listing: &'a Listing, name: &ModelName) -> Result<Vec<&'a HubFile>, HubError> {
    let is_weights = |file: &&HubFile| file.path.ends_with(".safetensors");
    let has = |path: &str| listing.files.iter().any(|file| file.path == path);
    if !has("config.json") || !listing.files.iter().any(|file| is_weights(&file)) {
        let why = "there is neither a GGUF file in it nor a checkpoint in safetensors";
        return Err(HubError::answer(&name.repo, why));
    }
    if let Some(quant) = &name.quant {
        return Err(HubError::Asked(format!(
            "{}: {quant} is a type of GGUF files, and it has none: pull {} and convert it",
            name.repo, name.repo
        )));
    }
    // Mistral's own copy of weights that are there by their usual names.
    let is_copy = |file: &&HubFile| file.path.starts_with("consolidated") && is_weights(file);
    let is_usual = |file: &&HubFile| file.path.starts_with("model") && is_weights(file);
    let has_usual = listing.files.iter().any(|file| is_usual(&file));
    let files = listing
        .files
        .iter()
        .filter(|file| !file.path.ends_with(".gguf"));
    Ok(files.filter(|file| !(has_usual && is_copy(file))).collect())
}

/// Downloads a file, unless it is here.
fn download(
    hub: &Hub,
    cache: &Cache,
    listing: &Listing,
    file: &HubFile,
    part: (usize, usize),
    on_event: &dyn Fn(HubEvent<'_>),
) -> Result<(), HubError> {
    let (path, bytes) = (file.path.as_str(), file.bytes);
    if !cache.has(&listing.repo, file) {
        on_event(HubEvent::Begins {
            file: path,
            bytes,
            part,
        });
    }
    cache.download(&listing.repo, file, |from, write| {
        let mut write = |chunk: &[u8], done| {
            on_event(HubEvent::Progress {
                file: path,
                done,
                bytes,
            });
            write(chunk)
        };
        hub.download(listing, file, from, &mut write, &|why| {
            on_event(HubEvent::Retries { why });
        })
    })?;
    cache.link(listing, file)
}

/// The projector that goes with the models of a repository, if it has one that this build can use:
/// its header is read first. Of several the one in F16, else the smallest.
#[cfg(feature = "vision")]
fn projector<'a>(
    hub: &Hub,
    listing: &'a Listing,
    on_event: &dyn Fn(HubEvent<'_>),
) -> Option<&'a HubFile> {
    let is_projector = |file: &&HubFile| {
        let name = file.path.rsplit('/').next().unwrap_or(&file.path);
        name.ends_with(".gguf") && name.to_ascii_lowercase().contains("mmproj")
    };
    let mut files: Vec<&HubFile> = listing.files.iter().filter(is_projector).collect();
    files.sort_by_key(|file| (!has_word(&file.path, "F16"), file.bytes));
    files.into_iter().find(|file| {
        let info = hub.header(listing, file).map_err(|why| why.to_string());
        let info = info.and_then(|header| {
            crate::vision::ProjectorInfo::of(&header.metadata).map_err(|why| why.to_string())
        });
        if let Err(why) = &info {
            on_event(HubEvent::Left {
                file: &file.path,
                why,
            });
        }
        info.is_ok()
    })
}
