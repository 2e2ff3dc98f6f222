//! Decoded images.

use crate::vision::VisionError;
use std::fmt;
use std::sync::Arc;

/// Longest side of an image.
pub const MAX_SIDE: u32 = 65_535;
/// Most pixels of an image.
pub const MAX_PIXELS: u64 = 1 << 26;

/// A decoded image: 8-bit RGB, row by row. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    width: u32,
    height: u32,
    rgb: Arc<[u8]>,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({} × {})", self.width, self.height)
    }
}

impl Image {
    /// Refuses sizes that no image may have. For callers who know the size before they decode.
    ///
    /// # Errors
    /// If a side is 0 or longer than [`MAX_SIDE`], or there are more than [`MAX_PIXELS`].
    pub fn check_size(width: u32, height: u32) -> Result<(), VisionError> {
        let n_pixels = u64::from(width) * u64::from(height);
        if n_pixels == 0 || width.max(height) > MAX_SIDE || n_pixels > MAX_PIXELS {
            return Err(VisionError::ImageSize {
                width: width.into(),
                height: height.into(),
                max_side: MAX_SIDE.into(),
                max_pixels: MAX_PIXELS,
            });
        }
        Ok(())
    }

    fn checked(width: u32, height: u32, n_channels: u64, bytes: &[u8]) -> Result<(), VisionError> {
        Image::check_size(width, height)?;
        let expected = u64::from(width) * u64::from(height) * n_channels;
        if bytes.len() as u64 != expected {
            return Err(VisionError::PixelBytes {
                found: bytes.len(),
                expected,
                width,
                height,
            });
        }
        Ok(())
    }

    /// An image of `height` rows of `width` pixels of 3 bytes: red, green, blue.
    ///
    /// # Errors
    /// If the size is not possible, or `rgb` has another length.
    pub fn rgb8(width: u32, height: u32, rgb: &[u8]) -> Result<Image, VisionError> {
        Image::checked(width, height, 3, rgb)?;
        Ok(Image {
            width,
            height,
            rgb: rgb.into(),
        })
    }

    /// An image of pixels of 4 bytes, the last of which is the opacity, laid over white.
    ///
    /// # Errors
    /// As [`Image::rgb8`].
    pub fn rgba8(width: u32, height: u32, rgba: &[u8]) -> Result<Image, VisionError> {
        Image::checked(width, height, 4, rgba)?;
        let over_white = |x: u8, alpha: u8| {
            let sum = u32::from(x) * u32::from(alpha) + 255 * (255 - u32::from(alpha));
            let rounded = sum + 128;
            ((rounded + (rounded >> 8)) >> 8) as u8
        };
        let (pixels, _) = rgba.as_chunks::<4>();
        let rgb = pixels
            .iter()
            .flat_map(|&[r, g, b, alpha]| [r, g, b].map(|x| over_white(x, alpha)));
        Ok(Image {
            width,
            height,
            rgb: rgb.collect(),
        })
    }

    /// Pixels per row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The pixels, 3 bytes each.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// Sides, as signless sizes.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.width as usize, self.height as usize)
    }

    /// An image of computed pixels, whose size is checked.
    pub(super) fn of(width: usize, height: usize, rgb: Vec<u8>) -> Image {
        debug_assert_eq!(rgb.len(), 3 * width * height);
        Image {
            width: width as u32,
            height: height as u32,
            rgb: rgb.into(),
        }
    }

    /// The part of `size` that begins at `(x, y)`.
    pub(super) fn crop(&self, (x, y): (usize, usize), size: (usize, usize)) -> Image {
        let stride = 3 * self.width as usize;
        let row = |i: usize| &self.rgb[(y + i) * stride + 3 * x..][..3 * size.0];
        let rgb = (0..size.1).flat_map(row).copied().collect();
        Image::of(size.0, size.1, rgb)
    }

    /// A canvas of `size` in one colour, with the image at `(x, y)`.
    pub(super) fn pad(
        &self,
        size: (usize, usize),
        (x, y): (usize, usize),
        colour: [u8; 3],
    ) -> Image {
        let mut rgb: Vec<u8> = colour
            .iter()
            .copied()
            .cycle()
            .take(3 * size.0 * size.1)
            .collect();
        let stride = 3 * self.width as usize;
        for (i, row) in self.rgb.chunks_exact(stride).enumerate() {
            rgb[3 * ((y + i) * size.0 + x)..][..stride].copy_from_slice(row);
        }
        Image::of(size.0, size.1, rgb)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        let size = |w, h| matches!(Image::check_size(w, h), Err(VisionError::ImageSize { .. }));
        assert!(size(0, 1) && size(1, 0) && size(65_535, 65_535) && size(70_000, 1));
        assert!(Image::check_size(1, 10_000).is_ok());
        let short = Image::rgb8(2, 2, &[0; 11]);
        assert!(matches!(
            short,
            Err(VisionError::PixelBytes { expected: 12, .. })
        ));
    }

    #[test]
    fn alpha_is_laid_over_white() {
        let image =
            Image::rgba8(1, 3, &[10, 20, 30, 255, 10, 20, 30, 0, 0, 100, 255, 128]).unwrap();
        assert_eq!(image.rgb(), [10, 20, 30, 255, 255, 255, 127, 177, 255]);
    }

    #[test]
    fn parts_and_canvases() {
        let image = Image::rgb8(2, 1, &[1, 2, 3, 4, 5, 6]).unwrap();
        let padded = image.pad((3, 2), (1, 1), [9, 8, 7]);
        assert_eq!(
            padded.rgb(),
            [9, 8, 7, 9, 8, 7, 9, 8, 7, 9, 8, 7, 1, 2, 3, 4, 5, 6]
        );
        assert_eq!(padded.crop((1, 1), (2, 1)), image);
    }
}
