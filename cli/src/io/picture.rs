//! Files of images: PNG, JPEG, WebP, GIF (the first picture), BMP.

use super::{Failure, input};
use image::{DynamicImage, ImageDecoder, ImageReader, Limits};
use ruvllm::vision::{Image, MAX_SIDE};
use std::io::{Cursor, Read};
use std::path::Path;

/// Most bytes of a file.
const MAX_BYTES: u64 = 64 << 20;
/// Most bytes that a decoder may take.
const MAX_MEMORY: u64 = 1 << 30;

/// The image in a file; `-` is stdin.
pub(crate) fn open(path: &Path) -> Result<Image, Failure> {
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin()
            .lock()
            .take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
    } else {
        let file = std::fs::File::open(path).map_err(Failure::file(path))?;
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes)
    };
    read.map_err(Failure::file(path))?;
    decode(&bytes).map_err(|why| Failure::Work(format!("{}: {why}", input::name(path))))
}

/// An image in the bytes of a file. Its size is checked before anything is decoded; a JPEG is turned
/// as its EXIF data say, and pictures that are not opaque are laid over white.
pub(crate) fn decode(bytes: &[u8]) -> Result<Image, String> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("the image has more than {} MiB", MAX_BYTES >> 20));
    }
    let not_read = |error: image::ImageError| format!("the image cannot be read: {error}");
    let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format();
    let mut reader = reader.map_err(|error| format!("the image cannot be read: {error}"))?;
    if reader.format().is_none() {
        return Err("this is no PNG, JPEG, WebP, GIF or BMP image".into());
    }
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE);
    limits.max_image_height = Some(MAX_SIDE);
    limits.max_alloc = Some(MAX_MEMORY);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(not_read)?;
    let (width, height) = decoder.dimensions();
    Image::check_size(width, height).map_err(|error| error.to_string())?;
    let orientation = decoder.orientation().map_err(not_read)?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(not_read)?;
    picture.apply_orientation(orientation);
    let (width, height) = (picture.width(), picture.height());
    let image = if picture.color().has_alpha() {
        Image::rgba8(width, height, &picture.into_rgba8())
    } else {
        Image::rgb8(width, height, &picture.into_rgb8())
    };
    image.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A BMP of one pixel whose header says another size.
    fn bmp(width: i32, height: i32) -> Vec<u8> {
        let mut bytes = b"BM".to_vec();
        bytes.extend([58_u32, 0, 54, 40].iter().flat_map(|x| x.to_le_bytes()));
        bytes.extend([width, height].iter().flat_map(|x| x.to_le_bytes()));
        bytes.extend([1_u16, 24].iter().flat_map(|x| x.to_le_bytes()));
        bytes.extend([0_u32; 6].iter().flat_map(|x| x.to_le_bytes()));
        bytes.extend([3, 2, 1, 0]);
        bytes
    }

    #[test]
    fn pictures() {
        let image = decode(&bmp(1, 1)).unwrap();
        assert_eq!(
            (image.width(), image.height(), image.rgb()),
            (1, 1, &[1, 2, 3][..])
        );
    }

    #[test]
    fn hostile_pictures() {
        for bytes in [
            bmp(65_535, 65_535),
            bmp(0, 0),
            bmp(i32::MAX, i32::MIN),
            bmp(1, 10_000),
        ] {
            assert!(decode(&bytes).is_err());
        }
        let whole = bmp(1, 1);
        for end in 0..whole.len() - 1 {
            let _ = decode(&whole[..end]);
        }
        assert!(decode(b"").is_err() && decode(b"<svg/>").is_err());
    }
}
