//! Images: from decoded pixels to embeddings that a model reads as it reads those of tokens.
//!
//! An [`Image`] is decoded pixels; decoding files is left to the caller. A [`Projector`], opened
//! from the file that belongs to a model (mmproj), prepares an image as the model's authors do,
//! encodes it and says which tokens stand around it. A session takes images between texts:
//! [`SessionImages::prefill`](crate::session::SessionImages::prefill).

mod attention;
mod cache;
mod digest;
mod encoded;
mod error;
mod file;
mod grid;
mod image;
mod kinds;
mod layout;
mod ops;
mod positions;
mod preprocess;
mod projector;
mod resize;
mod sizes;
mod vit;

pub use encoded::Encoded;
pub use error::VisionError;
pub use image::{Image, MAX_PIXELS, MAX_SIDE};
pub use layout::LayoutPart;
pub use preprocess::{ImageOptions, Pixels};
pub use projector::{ImageMemory, Projector, ProjectorInfo};
pub use resize::Filter;

impl Image {
    /// The image stretched to `width × height`, with the bits of Pillow 11.3.
    ///
    /// # Errors
    /// If that size is not possible.
    pub fn resized(&self, width: u32, height: u32, filter: Filter) -> Result<Image, VisionError> {
        Image::check_size(width, height)?;
        Ok(resize::resize(
            self,
            (width as usize, height as usize),
            filter,
        ))
    }
}
