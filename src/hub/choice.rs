//! Which files of a repository are a model, and which of its models is taken.

use super::HubEvent;
use super::client::{Hub, HubFile, Listing};
use super::error::HubError;
use super::name::ModelName;
use crate::engine::{MemoryPlan, PlanOptions};
use crate::gguf::Header;
use crate::model::Hparams;
use crate::system::SystemMemory;
use crate::tokenizer::Tokenizer;

/// Files that are one model: parts of a split one, or a single file.
pub(super) struct Group<T> {
    /// Path of the first.
    pub(super) name: String,
    /// In the order of parts.
    pub(super) files: Vec<T>,
    /// Whether all parts are there.
    pub(super) is_whole: bool,
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
pub(super) fn group<T>(mut files: Vec<(String, T)>) -> Vec<Group<T>> {
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
pub(super) fn has_word(path: &str, word: &str) -> bool {
    let (path, word) = (path.to_ascii_lowercase(), word.to_ascii_lowercase());
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    path.match_indices(&word).any(|(at, _)| {
        !is_part(path[..at].chars().next_back()) && !is_part(path[at + word.len()..].chars().next())
    })
}

/// The model among GGUF files that is asked for; without a word for its name, the largest that fits
/// into memory. Nothing if there are no such files.
pub(super) fn choose<'a>(
    hub: &Hub,
    listing: &'a Listing,
    name: &ModelName,
    on_event: &dyn Fn(HubEvent<'_>),
) -> Result<Option<Group<&'a HubFile>>, HubError> {
    let files = listing
        .files
        .iter()
        .map(|file| (file.path.clone(), file))
        .collect();
    let groups: Vec<Group<&HubFile>> = group(files)
        .into_iter()
        .filter(|group| group.is_whole)
        .collect();
    if groups.is_empty() {
        return Ok(None);
    }
    match &name.quant {
        Some(quant) => named(hub, listing, groups, quant).map(Some),
        None => largest(hub, listing, groups, on_event).map(Some),
    }
}

/// Lines with the names of models.
fn names(groups: &[Group<&HubFile>]) -> String {
    groups
        .iter()
        .map(|group| format!("\n  {}", group.name))
        .collect()
}

/// The only model with this word in its name.
fn named<'a>(
    hub: &Hub,
    listing: &Listing,
    mut groups: Vec<Group<&'a HubFile>>,
    quant: &str,
) -> Result<Group<&'a HubFile>, HubError> {
    let all = names(&groups);
    groups.retain(|group| has_word(&group.name, quant));
    match groups.len() {
        0 => Err(HubError::Asked(format!(
            "{quant} is in the name of none of these:{all}"
        ))),
        1 => {
            let group = groups.remove(0);
            match plan(&header(hub, listing, &group)?) {
                Ok(_) => Ok(group),
                Err(why) => Err(HubError::Unrunnable {
                    what: group.name,
                    why: format!("this build cannot run it: {why}"),
                }),
            }
        }
        _ => Err(HubError::Asked(format!(
            "{quant} is in the names of several:{}",
            names(&groups)
        ))),
    }
}

/// The largest model that runs in nine tenths of the memory that can be had.
fn largest<'a>(
    hub: &Hub,
    listing: &Listing,
    mut groups: Vec<Group<&'a HubFile>>,
    on_event: &dyn Fn(HubEvent<'_>),
) -> Result<Group<&'a HubFile>, HubError> {
    let repo = &listing.repo;
    let Some(memory) = SystemMemory::now().map(|memory| memory.available / 10 * 9) else {
        return Err(HubError::Asked(format!(
            "this system does not tell how much memory there is: name one, as in {repo}:Q4_K_M{}",
            names(&groups)
        )));
    };
    let size = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let bytes = |group: &Group<&HubFile>| group.files.iter().map(|file| file.bytes).sum::<u64>();
    groups.sort_by_key(|group| std::cmp::Reverse(bytes(group)));
    let mut obstacles = String::new();
    for group in groups {
        // Where weights alone are too many, nothing has to be asked for.
        let needs = if bytes(&group) > memory {
            bytes(&group)
        } else {
            match plan(&header(hub, listing, &group)?) {
                Ok(plan) if plan.total() <= memory => {
                    on_event(HubEvent::Chosen {
                        file: &group.name,
                        plan: &plan,
                        memory,
                    });
                    return Ok(group);
                }
                Ok(plan) => plan.total(),
                Err(why) => {
                    obstacles += &format!("\n  {}: this build cannot run it: {why}", group.name);
                    continue;
                }
            }
        };
        obstacles += &format!("\n  {}: {} of {}", group.name, size(needs), size(memory));
    }
    Err(HubError::Unrunnable {
        what: repo.clone(),
        why: format!("nothing of it can be run here:{obstacles}"),
    })
}

/// What a model with this header takes, or why this build cannot run it.
fn plan(header: &Header) -> Result<MemoryPlan, String> {
    let hparams =
        Hparams::of(&header.metadata, &header.tensors).map_err(|error| error.to_string())?;
    Tokenizer::opt_from_metadata(&header.metadata).map_err(|error| error.to_string())?;
    if let Some(t) = header.unsupported_weight() {
        let (name, dtype) = (&t.name, t.dtype);
        return Err(format!(
            "tensor {name} is of type {dtype}, which is not supported"
        ));
    }
    MemoryPlan::of_header(header, &hparams, &PlanOptions::default())
        .map_err(|error| error.to_string())
}

/// The header of a model; of a split one with the tensors of all parts.
pub(super) fn header(
    hub: &Hub,
    listing: &Listing,
    group: &Group<&HubFile>,
) -> Result<Header, HubError> {
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
