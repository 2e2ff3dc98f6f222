//! Failures around images.

use crate::compute::ComputeError;
use crate::gguf::GgufError;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why an image or a projector was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// The projector's file itself is invalid.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Computing failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// The image has no pixels, or too many.
    #[error(
        "an image of {width} × {height} pixels; sides of 1 to {max_side} and at most {max_pixels} pixels are possible"
    )]
    ImageSize {
        /// Its width.
        width: u64,
        /// Its height.
        height: u64,
        /// Longest side.
        max_side: u64,
        /// Most pixels.
        max_pixels: u64,
    },
    /// The pixels are not as many as the size says.
    #[error("{found} bytes of pixels for an image of {width} × {height}, which has {expected}")]
    PixelBytes {
        /// Bytes given.
        found: usize,
        /// Bytes of that size.
        expected: u64,
        /// Width.
        width: u32,
        /// Height.
        height: u32,
    },
    /// The image is longer than the model's authors allow.
    #[error("an image of {width} × {height} is too narrow for this model: {why}; crop it")]
    TooNarrow {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// The bound.
        why: &'static str,
    },
    /// The image would become too many tokens or patches.
    #[error(
        "an image of {width} × {height} would take {n} patches, more than {max}; set a smaller number of image tokens"
    )]
    TooManyPatches {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// Patches.
        n: u64,
        /// Most patches.
        max: u64,
    },
    /// An option makes no sense for this projector.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        value: usize,
        /// Valid values.
        expected: String,
    },
    /// The folder of encoded images cannot be used.
    #[error("{}: {error}; encoded images need a folder that can be read and written", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The failure.
        error: Arc<io::Error>,
    },
    /// The file is no projector.
    #[error("this file is no projector (mmproj) for images: {what}")]
    NotAProjector {
        /// What it is instead.
        what: String,
    },
    /// This build has no encoder of this kind.
    #[error("projector type {kind:?} is not supported; this build has: {}", .supported.join(", "))]
    UnsupportedKind {
        /// `clip.projector_type`.
        kind: String,
        /// The supported types.
        supported: Vec<&'static str>,
    },
    /// A hyper-parameter is missing.
    #[error("metadata key {key:?} is missing in the projector's file")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A hyper-parameter is out of range.
    #[error("metadata key {key:?} of the projector is {value}, expected {expected}")]
    OutOfRange {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// Valid values.
        expected: String,
    },
    /// A tensor is missing.
    #[error("tensor {name:?} is missing in the projector's file")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor that no part of the encoder uses.
    #[error("the projector's file has tensor {name:?}, which this build would ignore")]
    UnknownTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor has the wrong shape.
    #[error("tensor {name:?} of the projector has shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Its shape, innermost first.
        found: Vec<u64>,
        /// The shape that follows from the hyper-parameters.
        expected: Vec<u64>,
    },
    /// A tensor has a type that cannot be used there.
    #[error("tensor {name:?} of the projector has type {found}, expected {expected}")]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
        /// Usable types.
        expected: &'static str,
    },
    /// The model denoises whole texts.
    #[error("a model of {arch} denoises whole texts, and reads no images: leave them out")]
    Denoises {
        /// Its architecture.
        arch: String,
    },
    /// The projector is for another model.
    #[error("the projector belongs to another model: {what}")]
    OtherModel {
        /// The difference.
        what: String,
    },
}
