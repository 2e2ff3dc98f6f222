//! How a chat template shows images, and the parts of a prompt around them.

use super::Renderer;
use ruvllm::chat::ChatInputs;
use ruvllm::session::Part;
use ruvllm::vision::{Image, ImageOptions, Projector};
use serde_json::{Value, json};
use std::ops::Range;

/// Stands for an image in a message, where the template knows no images.
const MARK: &str = "\u{e000}image\u{e001}";
/// Around the number of an image in a message of a conversation that is kept as text.
const BEGIN: char = '\u{e002}';
const END: char = '\u{e003}';
/// A text by which it is seen what a template shows.
const PROBE: &str = "probe";

/// A text of a prompt, and ranges of it whose control tokens are plain text.
pub(crate) type Guarded<'p> = (&'p str, Vec<Range<usize>>);

/// What reads images, and how the template shows them.
pub(crate) struct ImageTemplate {
    pub(crate) projector: Projector,
    /// Bounds of the tokens of an image.
    pub(crate) options: ImageOptions,
    /// Whether messages are shown as lists of texts and images.
    shows_parts: bool,
    /// Whether no others are shown.
    needs_parts: bool,
}

impl ImageTemplate {
    pub(crate) fn new(
        projector: Projector,
        options: ImageOptions,
        template: &Renderer,
    ) -> ImageTemplate {
        let rendered = |content: Value| {
            let inputs = ChatInputs {
                messages: json!([{"role": "user", "content": content}]),
                add_generation_prompt: true,
                ..ChatInputs::new(&[])
            };
            // A template that fails shows nothing.
            template
                .render(&inputs)
                .map_or_else(|_| String::new(), |rendered| rendered.text)
        };
        let text = json!({"type": "text", "text": PROBE});
        let with_image = rendered(json!([{"type": "image"}, text]));
        let n_shown = projector.find_markers(&with_image).len();
        let shows_parts = n_shown == 1 && with_image.contains(PROBE);
        ImageTemplate {
            needs_parts: shows_parts && !rendered(PROBE.into()).contains(PROBE),
            shows_parts,
            projector,
            options,
        }
    }

    /// Puts the content of a message, a text or a list of texts and images, into the form that the
    /// template shows.
    pub(crate) fn fit(&self, content: &mut Value) {
        match content {
            Value::String(text) if self.needs_parts => {
                *content = json!([{"type": "text", "text": text}]);
            }
            Value::Array(parts) if !self.shows_parts => {
                let text = parts
                    .iter()
                    .map(|part| part["text"].as_str().unwrap_or(MARK));
                *content = text.collect::<String>().into();
            }
            _ => {}
        }
    }

    /// Where a text of a user has what would stand for an image.
    pub(crate) fn find_in_text(&self, text: &str) -> Vec<Range<usize>> {
        self.projector.find_markers(text)
    }

    /// Where a rendered conversation has its images.
    fn find(&self, prompt: &str, plain: &[Range<usize>]) -> Vec<Range<usize>> {
        if !self.shows_parts {
            return prompt
                .match_indices(MARK)
                .map(|(at, mark)| at..at + mark.len())
                .collect();
        }
        let is_plain = |marker: &Range<usize>| {
            let next = plain.get(plain.partition_point(|range| range.end <= marker.start));
            next.is_some_and(|range| range.start < marker.end)
        };
        let mut found = self.projector.find_markers(prompt);
        found.retain(|marker| !is_plain(marker));
        found
    }

    /// The texts of a rendered conversation around its images, one more than there are.
    ///
    /// # Errors
    /// If the template shows another number of images.
    pub(crate) fn texts<'p>(
        &self,
        prompt: &'p str,
        plain: &[Range<usize>],
        n_images: usize,
    ) -> Result<Vec<Guarded<'p>>, String> {
        let markers = self.find(prompt, plain);
        if markers.len() != n_images {
            return Err(format!(
                "there are {n_images} images, and the chat template shows {}; a text that stands for an image is none",
                markers.len()
            ));
        }
        // From the end of each image to the start of the next.
        let starts = std::iter::once(0).chain(markers.iter().map(|marker| marker.end));
        let ends = markers.iter().map(|marker| marker.start);
        let texts = starts.zip(ends.chain([prompt.len()])).map(|(start, end)| {
            let inside = plain
                .iter()
                .filter(|range| start <= range.start && range.end <= end)
                .map(|range| range.start - start..range.end - start);
            (&prompt[start..end], inside.collect())
        });
        Ok(texts.collect())
    }
}

/// Parts of a prompt: texts with images between them.
pub(crate) fn parts<'p>(
    texts: &'p [Guarded<'p>],
    images: impl IntoIterator<Item = (&'p Image, ImageOptions)>,
) -> Vec<Part<'p>> {
    let mut images = images.into_iter();
    let mut parts = Vec::with_capacity(2 * texts.len());
    for (text, plain) in texts {
        parts.push(Part::Guarded(text, plain));
        parts.extend(
            images
                .next()
                .map(|(image, options)| Part::ImageWith(image, options)),
        );
    }
    parts
}

/// Images of a conversation whose messages are texts, with marks in them.
#[derive(Default)]
pub(crate) struct Pictures(Vec<Image>);

impl Pictures {
    /// Adds an image; returns the text that stands for it.
    pub(crate) fn add(&mut self, image: Image) -> String {
        self.0.push(image);
        format!("{BEGIN}{}{END}", self.0.len() - 1)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A text of a user, in which nothing stands for an image.
    pub(crate) fn without_marks(text: &str) -> String {
        text.replace([BEGIN, END], "")
    }

    /// Turns a text with marks into a list of texts and images; these are added to `found`.
    pub(crate) fn expand<'p>(&'p self, content: &mut Value, found: &mut Vec<&'p Image>) {
        let Some(text) = content.as_str().filter(|text| text.contains(BEGIN)) else {
            return;
        };
        let mut parts = Vec::new();
        for part in text.split_inclusive([BEGIN, END]) {
            let image = part
                .strip_suffix(END)
                .and_then(|number| self.0.get(number.parse::<usize>().ok()?));
            let text = part.trim_end_matches([BEGIN, END]);
            match image {
                Some(image) => {
                    found.push(image);
                    parts.push(json!({"type": "image"}));
                }
                None if text.is_empty() => {}
                None => parts.push(json!({"type": "text", "text": text})),
            }
        }
        *content = parts.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_images() {
        let mut pictures = Pictures::default();
        let marks: Vec<String> = [1, 2]
            .map(|n| pictures.add(Image::rgb8(n, 1, &vec![0; 3 * n as usize]).unwrap()))
            .into();
        let mut content = Value::from(format!("{}a 7{}b", marks[1], marks[0]));
        let mut found = Vec::new();
        pictures.expand(&mut content, &mut found);
        let widths: Vec<u32> = found.iter().map(|image| image.width()).collect();
        assert_eq!(widths, [2, 1]);
        let (text, image) = (
            |text| json!({"type": "text", "text": text}),
            json!({"type": "image"}),
        );
        assert_eq!(content, json!([image, text("a 7"), image, text("b")]));
        let mut plain = Value::from("a 0 b");
        pictures.expand(&mut plain, &mut found);
        assert_eq!((plain, found.len()), ("a 0 b".into(), 2));
        assert_eq!(Pictures::without_marks(&format!("x{}y", marks[0])), "x0y");
    }
}
