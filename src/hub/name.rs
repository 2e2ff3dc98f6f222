//! Names of models and of their versions.

use super::error::HubError;
use std::str::FromStr;

/// Name of a model on the hub, `OWNER/NAME[:QUANT]`: its repository, and a word in the name of the file
/// that is wanted, as `Q4_K_M` is.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelName {
    /// `OWNER/NAME`.
    pub(super) repo: String,
    /// Word in the name of its file.
    pub(super) quant: Option<String>,
}

impl std::fmt::Display for ModelName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.quant {
            Some(quant) => write!(f, "{}:{quant}", self.repo),
            None => f.write_str(&self.repo),
        }
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<ModelName, HubError> {
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
            Some((owner, name)) if sound(owner) && sound(name) && quant != Some("") => {
                Ok(ModelName {
                    repo: repo.to_owned(),
                    quant: quant.map(str::to_owned),
                })
            }
            _ => Err(HubError::Asked(format!(
                "{text:?}: expected OWNER/NAME or OWNER/NAME:QUANT, as the hub has it"
            ))),
        }
    }
}

/// Branch, tag or commit of a repository; `main` unless told otherwise.
#[derive(Clone, Debug)]
pub struct Revision(pub(super) String);

impl FromStr for Revision {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Revision, HubError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if (1..=96).contains(&text.len()) && text.chars().all(allowed) && !text.starts_with('.') {
            Ok(Revision(text.into()))
        } else {
            Err(HubError::Asked(format!(
                "{text:?}: expected letters, digits, - _ and ."
            )))
        }
    }
}

impl Default for Revision {
    fn default() -> Revision {
        Revision("main".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = |repo: &str, quant: Option<&str>| ModelName {
            repo: repo.into(),
            quant: quant.map(str::to_owned),
        };
        assert_eq!(
            "a/b-GGUF".parse::<ModelName>().unwrap(),
            name("a/b-GGUF", None)
        );
        assert_eq!(
            "a/b:Q4_K_M".parse::<ModelName>().unwrap(),
            name("a/b", Some("Q4_K_M"))
        );
        for text in [
            "", "a", "a/b/c", "../b", "a/..", "a/b:", "a--b/c", "/b", "a/", "-a/b", "a/b c",
            "a\\b/c", "ä/b",
        ] {
            assert!(text.parse::<ModelName>().is_err(), "{text}");
        }
    }
}
