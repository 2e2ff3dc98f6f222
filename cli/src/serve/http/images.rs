//! Images in requests: where one stands, where its bytes are, and what they decode to.

use crate::io::picture;
use crate::serve::http::error::ApiError;
use crate::serve::http::ignored::Ignored;
use crate::serve::http::remote::ImageHosts;
use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use ruvllm::vision::{Image, MAX_PIXELS};
use serde_json::{Value, json};

/// Most images of a request.
const MAX_IMAGES: usize = 64;

/// Base64 whose padding may be missing, as some clients leave it out.
const PADDING: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
const BASE64: GeneralPurpose = GeneralPurpose::new(&base64::alphabet::STANDARD, PADDING);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&base64::alphabet::URL_SAFE, PADDING);

/// An image of a request, not yet decoded.
pub(crate) struct ImageSource {
    /// Where it stands, as in `messages[0].content[1]`.
    place: String,
    url: String,
    /// Whether few tokens are enough (`"detail": "low"`).
    pub(crate) is_low: bool,
}

/// A part of a message in the words of chat completions: an image in Base64.
pub(crate) fn base64_part(media_type: &str, data: &str) -> Value {
    image_part(&format!("data:{media_type};base64,{data}"), None)
}

/// The same of an image at an address.
pub(crate) fn image_part(url: &str, detail: Option<&Value>) -> Value {
    let mut image = json!({"url": url});
    if let Some(detail) = detail {
        image["detail"] = detail.clone();
    }
    json!({"type": "image_url", "image_url": image})
}

/// The images of a request.
#[derive(Default)]
pub(crate) struct ImageSources(pub(crate) Vec<ImageSource>);

impl ImageSources {
    /// Adds that of a part of a message, which is of the type `image_url`.
    pub(crate) fn add(&mut self, place: &str, part: &mut Value) -> Result<(), ApiError> {
        let wrong = |what: &str| ApiError::field(place, what);
        if self.0.len() == MAX_IMAGES {
            return Err(wrong(&format!("a request has at most {MAX_IMAGES} images")));
        }
        let mut image = part["image_url"].take();
        let (url, detail) = match &mut image {
            Value::Object(fields) => (
                fields.get_mut("url").map(Value::take),
                fields.get("detail").cloned(),
            ),
            text => (Some(text.take()), None),
        };
        let Some(Value::String(url)) = url else {
            return Err(wrong("the image has no url"));
        };
        let is_low = match detail.as_ref() {
            None | Some(Value::Null) => false,
            Some(Value::String(detail)) => match &detail[..] {
                "low" => true,
                "auto" | "high" | "original" => false,
                _ => {
                    let what =
                        format!("detail: expected auto, low, high or original, found {detail:?}");
                    return Err(wrong(&what));
                }
            },
            Some(_) => return Err(wrong("detail: expected a text")),
        };
        self.0.push(ImageSource {
            place: place.to_owned(),
            url,
            is_low,
        });
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Refuses them, where nothing reads images.
    pub(crate) fn refuse(&self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some(first) => Err(ApiError::field(
                &first.place,
                "the model reads text alone, and this is an image (image_url); start the server with --mmproj FILE",
            )),
        }
    }

    /// Decodes them: together at most as many pixels as one image may have.
    pub(crate) fn decode(&self, hosts: &ImageHosts) -> Result<Vec<Image>, ApiError> {
        let mut n_left = MAX_PIXELS;
        let mut images = Vec::with_capacity(self.0.len());
        for ImageSource { place, url, .. } in &self.0 {
            let wrong = |why: String| ApiError::field(place, why);
            let bytes = bytes_of(url, hosts).map_err(wrong)?;
            let image = picture::decode_within(&bytes, n_left).map_err(wrong)?;
            n_left -= u64::from(image.width()) * u64::from(image.height());
            images.push(image);
        }
        Ok(images)
    }

    /// Tells which of them have a detail that the model's images do not vary in.
    pub(crate) fn ignore_details(&self, ignored: &Ignored) {
        for source in self.0.iter().filter(|source| source.is_low) {
            ignored.add(&format!("{}.detail", source.place));
        }
    }
}

/// The bytes of an image: those in a data URL, or those at an address.
fn bytes_of(url: &str, hosts: &ImageHosts) -> Result<Vec<u8>, String> {
    let is_data = url
        .get(..5)
        .is_some_and(|start| start.eq_ignore_ascii_case("data:"));
    if !is_data {
        return hosts.get(url);
    }
    let (kind, data) = url[5..]
        .split_once(',')
        .ok_or("the data URL has no comma, behind which its data are")?;
    if !kind.to_ascii_lowercase().ends_with(";base64") {
        return Err(
            "a data URL of an image has its data in Base64: data:image/png;base64,…".into(),
        );
    }
    let has_space = data.bytes().any(|byte| byte.is_ascii_whitespace());
    let plain: String;
    let data = if has_space {
        plain = data.split_ascii_whitespace().collect();
        &plain[..]
    } else {
        data
    };
    let engine = if data.contains(['-', '_']) {
        &URL_SAFE
    } else {
        &BASE64
    };
    engine
        .decode(data)
        .map_err(|error| format!("the data URL is no Base64: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_urls() {
        let hosts = ImageHosts::default();
        let bytes = |url: &str| bytes_of(url, &hosts);
        for url in [
            "data:image/png;base64,AAEC/w==",
            "data:;base64,AAEC/w",
            "DATA:image/png;charset=x;BASE64,AAEC\n/w==",
            "data:image/png;base64,AAEC_w",
        ] {
            assert_eq!(bytes(url).unwrap(), [0, 1, 2, 255], "{url}");
        }
        for url in [
            "data:image/png,AAEC",
            "data:image/png;base64",
            "data:image/png;base64,%%",
            "",
            "é",
        ] {
            assert!(bytes(url).is_err(), "{url}");
        }
    }

    #[test]
    fn parts() {
        let mut all = ImageSources::default();
        all.add("p", &mut image_part("data:,", Some(&json!("low"))))
            .unwrap();
        all.add("p", &mut json!({"image_url": "data:,"})).unwrap();
        assert!(all.0[0].is_low && !all.0[1].is_low);
        for part in [
            json!({}),
            json!({"image_url": {}}),
            json!({"image_url": {"url": 1}}),
            json!({"image_url": {"url": "a", "detail": "huge"}}),
        ] {
            assert!(all.add("p", &mut part.clone()).is_err(), "{part}");
        }
        for _ in 2..MAX_IMAGES {
            all.add("p", &mut json!({"image_url": "a"})).unwrap();
        }
        assert!(all.add("p", &mut json!({"image_url": "a"})).is_err());
    }
}
