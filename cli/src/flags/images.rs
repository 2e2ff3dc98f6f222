//! Flags of images.

use super::model::ModelArgs;
use super::session::SessionArgs;
#[cfg(feature = "serve")]
use crate::io::note;
use crate::io::{Failure, picture};
use clap::Args;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::session::Part;
use ruvllm::vision::{Image, ImageOptions, Projector};
use std::path::{Path, PathBuf};

/// What reads images.
#[derive(Args, Default)]
#[command(next_help_heading = "Images")]
pub(crate) struct ProjectorArgs {
    /// Projector that reads images (mmproj) [default: the one beside the model] [short: -mm]
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_MMPROJ")]
    mmproj: Option<PathBuf>,
    /// Read text alone, though a projector is beside the model
    #[arg(long, conflicts_with = "mmproj")]
    no_mmproj: bool,
    /// Least tokens of an image, for models whose images vary in size
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    image_min_tokens: Option<u32>,
    /// Most tokens of an image, for models whose images vary in size
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    image_max_tokens: Option<u32>,
}

/// Images, and what reads them.
#[derive(Args)]
#[command(next_help_heading = "Images")]
pub(crate) struct ImageArgs {
    /// Image to read, once for each; - is stdin. It stands where the prompt has the model's marker
    /// or <__media__>, otherwise before the text
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    #[command(flatten)]
    projector: ProjectorArgs,
}

impl ImageArgs {
    /// Whether there are images.
    pub(crate) fn has_images(&self) -> bool {
        !self.images.is_empty()
    }

    pub(crate) fn options(&self) -> ImageOptions {
        self.projector.options()
    }

    /// The images, decoded.
    pub(crate) fn images(&self) -> Result<Vec<Image>, Failure> {
        self.images.iter().map(|path| picture::open(path)).collect()
    }

    /// What reads images.
    #[cfg(feature = "chat")]
    pub(crate) fn open(
        &self,
        args: &ModelArgs,
        sessions: &SessionArgs,
        model: &Model,
    ) -> Result<Projector, Failure> {
        self.projector.open(args, sessions, model)
    }

    /// Gives a session what reads images.
    pub(crate) fn prepare(
        &self,
        args: &ModelArgs,
        sessions: &SessionArgs,
        session: &mut Session,
    ) -> Result<Projector, Failure> {
        let projector = self.projector.open(args, sessions, session.model())?;
        session.images().set_projector(&projector, self.options())?;
        Ok(projector)
    }
}

impl ProjectorArgs {
    pub(crate) fn options(&self) -> ImageOptions {
        ImageOptions {
            min_tokens: self.image_min_tokens.map(|n| n as usize),
            max_tokens: self.image_max_tokens.map(|n| n as usize),
        }
    }

    /// What reads images, which there has to be.
    pub(crate) fn open(
        &self,
        args: &ModelArgs,
        sessions: &SessionArgs,
        model: &Model,
    ) -> Result<Projector, Failure> {
        if self.no_mmproj {
            return Err(Failure::Usage(
                "images need a projector: leave out --no-mmproj".into(),
            ));
        }
        let projector = match &self.mmproj {
            Some(path) => open(path, model)?,
            None => beside(args, model)?,
        };
        kept_on_disk(projector, sessions)
    }

    /// The projector that is named, or the one beside the model that is for it.
    pub(crate) fn any(
        &self,
        args: &ModelArgs,
        model: &Model,
    ) -> Result<Option<Projector>, Failure> {
        match &self.mmproj {
            _ if self.no_mmproj => Ok(None),
            Some(path) => open(path, model).map(Some),
            None => Ok(beside(args, model).ok()),
        }
    }

    /// What reads images, if there is a projector for the model; a note says which was taken.
    #[cfg(feature = "serve")]
    pub(crate) fn find(
        &self,
        args: &ModelArgs,
        sessions: &SessionArgs,
        model: &Model,
    ) -> Result<Option<Projector>, Failure> {
        if self.no_mmproj {
            return Ok(None);
        }
        if self.mmproj.is_some() {
            return self.open(args, sessions, model).map(Some);
        }
        let paths = candidates(args)?;
        let mut fitting = fitting(&paths, model);
        match (fitting.next(), fitting.next()) {
            (Some((path, projector)), None) => {
                note(format!("images are read by {}", path.display()));
                kept_on_disk(projector, sessions).map(Some)
            }
            (None, _) => Ok(None),
            (Some((one, _)), Some((other, _))) => {
                note(format!(
                    "images are not read: {} and {} are both for this model; --mmproj FILE names one",
                    one.display(),
                    other.display()
                ));
                Ok(None)
            }
        }
    }
}

fn open(path: &Path, model: &Model) -> Result<Projector, Failure> {
    Projector::open(path, model)
        .map_err(|error| Failure::Work(format!("{}: {error}", path.display())))
}

/// Keeps encoded images where keys and values of prompts are, if these are kept.
fn kept_on_disk(projector: Projector, sessions: &SessionArgs) -> Result<Projector, Failure> {
    if let Some((folder, budget)) = sessions.image_folder() {
        projector.set_cache_folder(folder, budget)?;
    }
    Ok(projector)
}

/// Files that may be projectors, in the folder of the model: those with `mmproj` in their names.
fn candidates(args: &ModelArgs) -> Result<Vec<PathBuf>, Failure> {
    let Some(model) = args.file()? else {
        return Ok(Vec::new());
    };
    let folder = model
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(".".as_ref());
    let is_projector = |path: &PathBuf| {
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().to_lowercase());
        name.is_some_and(|name| name.contains("mmproj") && name.ends_with(".gguf"))
    };
    let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(is_projector)
        .collect();
    found.sort();
    Ok(found)
}

/// Those of them that are projectors for the model.
fn fitting<'p>(
    paths: &'p [PathBuf],
    model: &Model,
) -> impl Iterator<Item = (&'p PathBuf, Projector)> {
    let open = |path| Some((path, Projector::open(path, model).ok()?));
    paths.iter().filter_map(open)
}

/// The projector in the folder of the model. Of several, the one that is for the model.
fn beside(args: &ModelArgs, model: &Model) -> Result<Projector, Failure> {
    let missing = |why: &str| Failure::Usage(format!("images need --mmproj FILE: {why}"));
    let found = candidates(args)?;
    if let [one] = &found[..] {
        return open(one, model);
    }
    let mut fitting = fitting(&found, model);
    match (fitting.next(), fitting.next()) {
        (Some((_, projector)), None) => Ok(projector),
        (None, _) if args.is_demo() => Err(missing("the built-in model reads no images")),
        (None, _) => Err(missing("there is no mmproj file for it beside the model")),
        (Some((one, _)), Some((other, _))) => Err(missing(&format!(
            "{} and {} are both for the model",
            one.display(),
            other.display()
        ))),
    }
}

/// The parts of a prompt: images stand where it has markers, or before it if it has none.
pub(crate) fn parts<'a>(
    projector: &Projector,
    prompt: &'a str,
    images: &'a [Image],
) -> Result<Vec<Part<'a>>, Failure> {
    let texts = projector.texts_around(prompt);
    let mut parts = Vec::new();
    if texts.len() == 1 {
        parts.extend(images.iter().map(Part::Image));
        parts.push(Part::Text(prompt));
        return Ok(parts);
    }
    if texts.len() != images.len() + 1 {
        return Err(Failure::Usage(format!(
            "the prompt has {} markers for {} images",
            texts.len() - 1,
            images.len()
        )));
    }
    for (i, text) in texts.into_iter().enumerate() {
        if i > 0 {
            parts.push(Part::Image(&images[i - 1]));
        }
        parts.push(Part::Text(text));
    }
    Ok(parts)
}
