//! Models by name, from Hugging Face's hub or already here: what `ruvllm pull`, `list`, `rm` and
//! the flag `-hf` use.
//!
//! `hub.rs` speaks to Hugging Face's hub, `cache.rs` knows its usual folder on this machine. A
//! model's header comes first, so that one that this build cannot run is refused before it is
//! downloaded.

mod cache;
mod hub;

use crate::io::memory::to_fill;
use crate::io::runnable::obstacle;
use crate::io::{Failure, Progress, note, size};
pub(crate) use cache::{Cache, Cached};
#[cfg(feature = "serve")]
pub(crate) use hub::tls;
use hub::{Hub, HubFile, Listing};
use ruvllm::Tokenizer;
use ruvllm::engine::{MemoryPlan, PlanOptions};
use ruvllm::gguf::Header;
use ruvllm::model::Hparams;
use std::path::PathBuf;
use std::str::FromStr;

/// `OWNER/NAME[:QUANT]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Name {
    /// `OWNER/NAME`.
    repo: String,
    quant: Option<String>,
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.quant {
            Some(quant) => write!(f, "{}:{quant}", self.repo),
            None => f.write_str(&self.repo),
        }
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Name, String> {
        let (repo, quant) = text
            .split_once(':')
            .map_or((text, None), |(repo, quant)| (repo, Some(quant)));
        let sound = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            // What the hub allows: the two dashes separate names in the cache.
            (1..=96).contains(&part.len())
                && part.chars().all(allowed)
                && !part.starts_with(['.', '-'])
                && !part.contains("--")
                && !part.contains("..")
        };
        match repo.split_once('/') {
            Some((owner, name)) if sound(owner) && sound(name) && quant != Some("") => Ok(Name {
                repo: repo.to_owned(),
                quant: quant.map(str::to_owned),
            }),
            _ => Err("expected OWNER/NAME or OWNER/NAME:QUANT, as the hub has it".into()),
        }
    }
}

/// A branch, a tag or a commit.
#[derive(Clone, Debug)]
pub(crate) struct Revision(String);

impl FromStr for Revision {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Revision, &'static str> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if (1..=96).contains(&text.len()) && text.chars().all(allowed) && !text.starts_with('.') {
            Ok(Revision(text.into()))
        } else {
            Err("expected letters, digits, - _ and .")
        }
    }
}

/// The files of a model that are here.
pub(crate) fn find(name: &Name) -> Result<(Cache, Vec<Cached>), Failure> {
    let cache = Cache::open()?;
    let models = cache.models()?.into_iter().filter(|m| m.repo == name.repo);
    let matches = |m: &Cached| {
        name.quant
            .as_deref()
            .is_none_or(|quant| has_word(&m.file, quant))
    };
    let models: Vec<_> = models.filter(matches).collect();
    if models.is_empty() {
        return Err(Failure::Work(
            "there is no such model here: `ruvllm list` lists them".into(),
        ));
    }
    Ok((cache, models))
}

/// The file of a model that `-hf` names: the one that is here, otherwise the hub's.
pub(crate) fn resolve(name: &Name) -> Result<PathBuf, Failure> {
    let here = Cache::open()?.newest(&name.repo)?;
    let groups = group(here.into_iter().map(|m| (m.file.clone(), m)).collect());
    let mut groups: Vec<_> = groups
        .into_iter()
        .filter(|g| {
            name.quant
                .as_deref()
                .is_none_or(|quant| has_word(&g.name, quant))
        })
        .collect();
    match groups.pop() {
        Some(group) if groups.is_empty() && group.is_whole => Ok(group.files[0].path.clone()),
        _ => fetch(name, &Revision("main".into()), &[]),
    }
}

/// Downloads a model, unless it is here; the path of its (first) file.
pub(crate) fn fetch(
    name: &Name,
    revision: &Revision,
    hosts: &[String],
) -> Result<PathBuf, Failure> {
    let (hub, cache) = (Hub::new(hosts)?, Cache::open()?);
    let listing = hub.list(&name.repo, &revision.0)?;
    let group = choose(&hub, &listing, name)?;
    let n = group.files.len();
    for (i, file) in group.files.iter().enumerate() {
        let part = if n > 1 {
            format!(", part {} of {n}", i + 1)
        } else {
            String::new()
        };
        download(&hub, &cache, &listing, file, &part)?;
    }
    #[cfg(feature = "vision")]
    if let Some(projector) = projector(&hub, &listing) {
        download(&hub, &cache, &listing, projector, ", which reads images")?;
    }
    cache.set_revision(&listing, &revision.0)?;
    Ok(cache.path(&listing, group.files[0]))
}

/// Downloads a file, unless it is here.
fn download(
    hub: &Hub,
    cache: &Cache,
    listing: &Listing,
    file: &HubFile,
    about: &str,
) -> Result<(), Failure> {
    if !cache.has(&listing.repo, file) {
        note(format!(
            "downloading {} ({}{about})",
            file.path,
            size(file.bytes)
        ));
    }
    let mut bar = None;
    cache.download(&listing.repo, file, |from, write| {
        let bar = bar.get_or_insert_with(|| Progress::new("downloading", file.bytes));
        hub.download(listing, file, from, |bytes, at| {
            bar.set(at);
            write(bytes)
        })
    })?;
    cache.link(listing, file)
}

/// The projector that goes with the models of a repository, if it has one that this build can use:
/// its header is read first. Of several the one in F16, else the smallest.
#[cfg(feature = "vision")]
fn projector<'a>(hub: &Hub, listing: &'a Listing) -> Option<&'a HubFile> {
    let is_projector = |file: &&HubFile| {
        let name = file.path.rsplit('/').next().unwrap_or(&file.path);
        name.to_ascii_lowercase().contains("mmproj")
    };
    let mut files: Vec<&HubFile> = listing.files.iter().filter(is_projector).collect();
    files.sort_by_key(|file| (!has_word(&file.path, "F16"), file.bytes));
    files.into_iter().find(|file| {
        let info = hub.header(listing, file).map_err(|why| why.into_text());
        let info = info.and_then(|header| {
            ruvllm::vision::ProjectorInfo::of(&header.metadata).map_err(|why| why.to_string())
        });
        if let Err(why) = &info {
            note(format!("{} is left there: {why}", file.path));
        }
        info.is_ok()
    })
}

/// Files that are one model: parts of a split one, or a single file.
struct Group<T> {
    /// Path of the first.
    name: String,
    /// In the order of parts.
    files: Vec<T>,
    /// Whether all parts are there.
    is_whole: bool,
}

/// `NAME-00001-of-00003.gguf`: what is before the number, the part and how many there are.
fn part_of(path: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = path.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let number = |text: &str| {
        text.parse()
            .ok()
            .filter(|_| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit()))
    };
    Some((stem, number(part)?, number(count)?))
}

/// Models among files with these paths.
fn group<T>(mut files: Vec<(String, T)>) -> Vec<Group<T>> {
    files.retain(|(path, _)| {
        let file_name = path.rsplit('/').next().unwrap_or(path);
        // What goes with a model, but is none.
        path.ends_with(".gguf")
            && !file_name.to_ascii_lowercase().contains("mmproj")
            && !file_name.contains("imatrix")
    });
    files.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut groups: Vec<(Option<String>, usize, Group<T>)> = Vec::new();
    for (path, file) in files {
        let part = part_of(&path);
        let stem = part.map(|(stem, ..)| stem.to_owned());
        match groups.last_mut() {
            Some((last, _, group)) if stem.is_some() && *last == stem => group.files.push(file),
            _ => {
                let count = part.map_or(1, |(.., count)| count);
                groups.push((
                    stem,
                    count,
                    Group {
                        name: path,
                        files: vec![file],
                        is_whole: false,
                    },
                ));
            }
        }
    }
    let whole = |(_, count, group): (_, usize, Group<T>)| Group {
        is_whole: group.files.len() == count,
        ..group
    };
    groups.into_iter().map(whole).collect()
}

/// Whether a path contains a word, between characters that belong to none: `Q4_K` is not in
/// `Q4_K_M`.
fn has_word(path: &str, word: &str) -> bool {
    let (path, word) = (path.to_ascii_lowercase(), word.to_ascii_lowercase());
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    path.match_indices(&word).any(|(at, _)| {
        !is_part(path[..at].chars().next_back()) && !is_part(path[at + word.len()..].chars().next())
    })
}

/// The model that is asked for; without a word for its name, the largest that fits into memory.
fn choose<'a>(hub: &Hub, listing: &'a Listing, name: &Name) -> Result<Group<&'a HubFile>, Failure> {
    let files = listing
        .files
        .iter()
        .map(|file| (file.path.clone(), file))
        .collect();
    let mut groups: Vec<Group<&HubFile>> = group(files)
        .into_iter()
        .filter(|group| group.is_whole)
        .collect();
    let names = |groups: &[Group<&HubFile>]| {
        groups
            .iter()
            .map(|group| format!("\n  {}", group.name))
            .collect::<String>()
    };
    if groups.is_empty() {
        return Err(Failure::Work(format!(
            "{}: there is no GGUF file in it",
            name.repo
        )));
    }
    if let Some(quant) = &name.quant {
        let all = names(&groups);
        groups.retain(|group| has_word(&group.name, quant));
        return match (groups.pop(), groups.is_empty()) {
            (Some(group), true) => match plan(&header(hub, listing, &group)?) {
                Ok(_) => Ok(group),
                Err(obstacle) => Err(Failure::Work(format!(
                    "{}: this build cannot run it: {obstacle}",
                    group.name
                ))),
            },
            (Some(last), false) => {
                groups.push(last);
                Err(Failure::Usage(format!(
                    "{quant} is in the names of several:{}",
                    names(&groups)
                )))
            }
            (None, _) => Err(Failure::Usage(format!(
                "{quant} is in the name of none of these:{all}"
            ))),
        };
    }
    let bytes = |group: &Group<&HubFile>| group.files.iter().map(|file| file.bytes).sum::<u64>();
    groups.sort_by_key(|group| std::cmp::Reverse(bytes(group)));
    let memory = to_fill().ok_or_else(|| {
        let all = names(&groups);
        Failure::Usage(format!(
            "this system does not tell how much memory there is: name one, as in {}:Q4_K_M{all}",
            name.repo
        ))
    })?;
    let mut obstacles = String::new();
    for group in groups {
        // Weights alone are too many; nothing has to be asked for that.
        if bytes(&group) > memory {
            obstacles += &format!(
                "\n  {}: {} of {}",
                group.name,
                size(bytes(&group)),
                size(memory)
            );
            continue;
        }
        let plan = match plan(&header(hub, listing, &group)?) {
            Ok(plan) => plan,
            Err(obstacle) => {
                obstacles += &format!("\n  {}: this build cannot run it: {obstacle}", group.name);
                continue;
            }
        };
        if plan.total() <= memory {
            let (total, n_ctx) = (size(plan.total()), plan.n_ctx);
            note(format!(
                "{} takes {total} with {n_ctx} tokens: the largest that fits into {}",
                group.name,
                size(memory)
            ));
            return Ok(group);
        }
        obstacles += &format!(
            "\n  {}: {} of {}",
            group.name,
            size(plan.total()),
            size(memory)
        );
    }
    Err(Failure::Work(format!(
        "{}: nothing of it can be run here:{obstacles}",
        name.repo
    )))
}

/// What a model with this header takes, or why this build cannot run it.
fn plan(header: &Header) -> Result<MemoryPlan, String> {
    let hparams = Hparams::of(&header.metadata, &header.tensors);
    let tokenizer = Tokenizer::opt_from_metadata(&header.metadata);
    match (obstacle(header, &hparams, &tokenizer), hparams) {
        (None, Ok(h)) => MemoryPlan::of_header(header, &h, &PlanOptions::default())
            .map_err(|error| error.to_string()),
        (obstacle, _) => Err(obstacle.unwrap_or_default()),
    }
}

/// The header of a model; of a split one with the tensors of all parts.
fn header(hub: &Hub, listing: &Listing, group: &Group<&HubFile>) -> Result<Header, Failure> {
    let mut whole = hub.header(listing, group.files[0])?;
    for file in &group.files[1..] {
        whole.tensors.extend(hub.header(listing, file)?.tensors);
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = |repo: &str, quant: Option<&str>| Name {
            repo: repo.into(),
            quant: quant.map(str::to_owned),
        };
        assert_eq!("a/b-GGUF".parse(), Ok(name("a/b-GGUF", None)));
        assert_eq!("a/b:Q4_K_M".parse(), Ok(name("a/b", Some("Q4_K_M"))));
        for text in [
            "", "a", "a/b/c", "../b", "a/..", "a/b:", "a--b/c", "/b", "a/", "-a/b", "a/b c",
            "a\\b/c", "ä/b",
        ] {
            assert!(text.parse::<Name>().is_err(), "{text}");
        }
    }

    #[test]
    fn words_of_file_names() {
        for (path, word, expected) in [
            ("m-Q4_K_M.gguf", "q4_k_m", true),
            ("m.Q4_K_M.gguf", "Q4_K_M", true),
            ("Q8_0/m-00001-of-00002.gguf", "Q8_0", true),
            ("m-UD-Q4_K_XL.gguf", "Q4_K_XL", true),
            ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL", true),
            ("m-Q4_K_M.gguf", "Q4_K", false),
            ("m-IQ4_XS.gguf", "Q4_XS", false),
            ("m-bf16.gguf", "F16", false),
            ("m-q8_0.gguf", "m-q8_0.gguf", true),
        ] {
            assert_eq!(has_word(path, word), expected, "{word} in {path}");
        }
    }

    #[test]
    fn parts_belong_together() {
        let paths = [
            "b-00002-of-00003.gguf",
            "b-00001-of-00003.gguf",
            "b-00003-of-00003.gguf",
            "c-00001-of-00002.gguf",
            "a.gguf",
            "mmproj-a.gguf",
            "a.imatrix.gguf",
            "README.md",
            "d-1-of-2.gguf",
        ];
        let groups = group(paths.iter().map(|path| (path.to_string(), *path)).collect());
        let found: Vec<_> = groups
            .iter()
            .map(|g| (g.name.as_str(), g.files.len(), g.is_whole))
            .collect();
        let expected = [
            ("a.gguf", 1, true),
            ("b-00001-of-00003.gguf", 3, true),
            ("c-00001-of-00002.gguf", 1, false),
            ("d-1-of-2.gguf", 1, true),
        ];
        assert_eq!(found, expected);
    }
}
