//! Flags of images.

use super::model::ModelArgs;
use crate::io::{Failure, picture};
use clap::Args;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::session::Part;
use ruvllm::vision::{Image, ImageOptions, Projector};
use std::path::PathBuf;

/// Images, and what reads them.
#[derive(Args)]
pub(crate) struct ImageArgs {
    /// Projector that reads images (mmproj) [default: the one beside the model]
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_MMPROJ")]
    mmproj: Option<PathBuf>,
    /// Image to read, once for each; - is stdin. It stands where the prompt has the model's marker
    /// or <__media__>, otherwise before the text
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// Least tokens of an image, for models whose images vary in size
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    image_min_tokens: Option<u32>,
    /// Most tokens of an image, for models whose images vary in size
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    image_max_tokens: Option<u32>,
}

impl ImageArgs {
    /// Whether there are images.
    pub(crate) fn has_images(&self) -> bool {
        !self.images.is_empty()
    }

    pub(crate) fn options(&self) -> ImageOptions {
        ImageOptions {
            min_tokens: self.image_min_tokens.map(|n| n as usize),
            max_tokens: self.image_max_tokens.map(|n| n as usize),
        }
    }

    /// The images, decoded.
    pub(crate) fn images(&self) -> Result<Vec<Image>, Failure> {
        self.images.iter().map(|path| picture::open(path)).collect()
    }

    /// What reads them.
    pub(crate) fn projector(&self, args: &ModelArgs, model: &Model) -> Result<Projector, Failure> {
        let path = match &self.mmproj {
            Some(path) => path.clone(),
            None => beside(args)?,
        };
        Projector::open(&path, model)
            .map_err(|error| Failure::Work(format!("{}: {error}", path.display())))
    }

    /// Gives a session what reads images.
    pub(crate) fn prepare(
        &self,
        args: &ModelArgs,
        session: &mut Session,
    ) -> Result<Projector, Failure> {
        let projector = self.projector(args, session.model())?;
        session.images().set_projector(&projector, self.options())?;
        Ok(projector)
    }
}

/// The projector in the folder of the model: a GGUF file with `mmproj` in its name.
fn beside(args: &ModelArgs) -> Result<PathBuf, Failure> {
    let missing = |why: &str| Failure::Usage(format!("--image needs --mmproj FILE: {why}"));
    let Some(model) = args.file()? else {
        return Err(missing("the built-in model reads no images"));
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
    match &found[..] {
        [] => Err(missing("there is no mmproj file beside the model")),
        [one] => Ok(one.clone()),
        several => {
            let names = several.iter().map(|path| path.display().to_string());
            let names = names.collect::<Vec<_>>().join(", ");
            Err(missing(&format!(
                "there are several beside the model, {names}"
            )))
        }
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
