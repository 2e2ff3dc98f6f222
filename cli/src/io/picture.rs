//! Files of images: PNG, JPEG, WebP, GIF (the first picture), BMP.

use super::{Failure, input};
use image::{DynamicImage, ImageBuffer, ImageDecoder, ImageReader, Limits, Pixel};
use ruvllm::vision::{Image, MAX_PIXELS, MAX_SIDE};
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
///
/// # Errors
/// What is wrong with it, in words.
pub fn decode(bytes: &[u8]) -> Result<Image, String> {
    decode_within(bytes, MAX_PIXELS)
}

/// The same of an image that has at most `n_pixels`.
pub(crate) fn decode_within(bytes: &[u8], n_pixels: u64) -> Result<Image, String> {
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
    if u64::from(width) * u64::from(height) > n_pixels {
        return Err(format!(
            "an image of {width} × {height} pixels: all images together may have {MAX_PIXELS}"
        ));
    }
    let orientation = decoder.orientation().map_err(not_read)?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(not_read)?;
    picture.apply_orientation(orientation);
    let picture = in_eight_bits(picture);
    let (width, height) = (picture.width(), picture.height());
    let image = if picture.color().has_alpha() {
        Image::rgba8(width, height, &picture.into_rgba8())
    } else {
        Image::rgb8(width, height, &picture.into_rgb8())
    };
    image.map_err(|error| error.to_string())
}

/// A picture of 16 bits by its high bytes, as Pillow reads colours.
fn in_eight_bits(picture: DynamicImage) -> DynamicImage {
    fn high<P: Pixel<Subpixel = u16>, Q: Pixel<Subpixel = u8>>(
        of: &ImageBuffer<P, Vec<u16>>,
    ) -> ImageBuffer<Q, Vec<u8>> {
        let values = of.iter().map(|x| (x >> 8) as u8).collect();
        ImageBuffer::from_raw(of.width(), of.height(), values).expect("as many values as before")
    }
    match &picture {
        DynamicImage::ImageLuma16(of) => DynamicImage::ImageLuma8(high(of)),
        DynamicImage::ImageLumaA16(of) => DynamicImage::ImageLumaA8(high(of)),
        DynamicImage::ImageRgb16(of) => DynamicImage::ImageRgb8(high(of)),
        DynamicImage::ImageRgba16(of) => DynamicImage::ImageRgba8(high(of)),
        _ => picture,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::codecs::gif::GifEncoder;
    use image::{Frame, ImageFormat, Rgb, RgbImage, Rgba, RgbaImage};

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

    /// CRC-32 of PNG.
    fn crc(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
            })
        })
    }

    fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
        let named = [kind, data].concat();
        let mut chunk = (data.len() as u32).to_be_bytes().to_vec();
        chunk.extend(&named);
        chunk.extend(crc(&named).to_be_bytes());
        chunk
    }

    /// A PNG without pixels: depth and colour are those of the format.
    fn png(width: u32, height: u32, depth: u8, colour: u8) -> Vec<u8> {
        let mut header = [width, height].map(u32::to_be_bytes).concat();
        header.extend([depth, colour, 0, 0, 0]);
        let start = b"\x89PNG\r\n\x1a\n".to_vec();
        [
            start,
            chunk(b"IHDR", &header),
            chunk(b"IDAT", &[0x78, 1, 3, 0, 0, 0, 0, 1]),
            chunk(b"IEND", &[]),
        ]
        .concat()
    }

    fn encoded(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Vec::new();
        picture
            .write_to(&mut Cursor::new(&mut bytes), format)
            .unwrap();
        bytes
    }

    /// A few pixels of different colours.
    fn colours() -> RgbImage {
        RgbImage::from_fn(5, 3, |x, y| Rgb([50 * x as u8, 80 * y as u8, 200]))
    }

    #[test]
    fn pictures() {
        let image = decode(&bmp(1, 1)).unwrap();
        assert_eq!(
            (image.width(), image.height(), image.rgb()),
            (1, 1, &[1, 2, 3][..])
        );
        let picture = DynamicImage::ImageRgb8(colours());
        for format in [ImageFormat::Png, ImageFormat::Bmp] {
            assert_eq!(
                decode(&encoded(&picture, format)).unwrap().rgb(),
                &*colours()
            );
        }
        // Depths beyond 8 bits, grey, and what is not opaque.
        let deep = DynamicImage::ImageRgb16(picture.to_rgb16());
        let deep = decode(&encoded(&deep, ImageFormat::Png)).unwrap();
        assert_eq!(deep.rgb(), &*colours());
        let clear = RgbaImage::from_pixel(2, 2, Rgba([9, 9, 9, 0]));
        let clear = encoded(&DynamicImage::ImageRgba8(clear), ImageFormat::Png);
        assert_eq!(decode(&clear).unwrap().rgb(), [255; 12]);
        // 1 × 10,000 is a picture; whether a model takes it is the model's affair.
        let thin = DynamicImage::ImageRgb8(RgbImage::new(1, 10_000));
        assert!(decode(&encoded(&thin, ImageFormat::Png)).is_ok());
    }

    /// What the models' authors' code reads from files: `tests/reference_pictures.py`.
    #[test]
    fn pictures_are_those_of_pillow() {
        let all = include_str!("../../tests/data/pictures.json");
        let all: serde_json::Value = serde_json::from_str(all).unwrap();
        let bytes = |hex: &serde_json::Value| -> Vec<u8> {
            let hex = hex.as_str().unwrap();
            let pair = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
            (0..hex.len()).step_by(2).map(pair).collect()
        };
        for entry in all.as_array().unwrap() {
            let name = &entry["name"];
            let image =
                decode(&bytes(&entry["file"])).unwrap_or_else(|why| panic!("{name}: {why}"));
            let size: (serde_json::Value, serde_json::Value) =
                (image.width().into(), image.height().into());
            assert_eq!(
                (&size.0, &size.1),
                (&entry["width"], &entry["height"]),
                "{name}"
            );
            let differ = image.rgb().iter().zip(bytes(&entry["rgb"]));
            let most = differ.map(|(&a, b)| a.abs_diff(b)).max().unwrap();
            let bound = entry["tolerance"].as_u64().unwrap();
            assert!(u64::from(most) <= bound, "{name}: differs by {most}");
        }
    }

    #[test]
    fn the_first_picture_of_several() {
        let mut bytes = Vec::new();
        let frame = |red| Frame::new(RgbaImage::from_pixel(2, 2, Rgba([red, 0, 0, 255])));
        GifEncoder::new(&mut bytes)
            .encode_frames([frame(255), frame(0)])
            .unwrap();
        assert_eq!(decode(&bytes).unwrap().rgb()[..3], [255, 0, 0]);
    }

    /// Sizes are checked before anything is decoded, and what is broken is said to be.
    #[test]
    fn hostile_pictures() {
        for bytes in [
            bmp(65_535, 65_535),
            bmp(0, 0),
            bmp(i32::MAX, i32::MIN),
            bmp(1, 10_000),
            png(65_535, 65_535, 8, 2),
            png(0, 1, 8, 2),
            png(1, 0, 16, 6),
            png(u32::MAX, 1, 8, 2),
            // Within the limit of pixels, but there are none.
            png(8192, 8192, 16, 6),
            png(1, 10_000, 1, 0),
            // Depths and colours that do not go together.
            png(1, 1, 3, 2),
            png(1, 1, 16, 3),
        ] {
            assert!(decode(&bytes).is_err());
        }
        assert!(decode(b"").is_err() && decode(b"<svg/>").is_err());
        let error = decode(&png(65_535, 65_535, 8, 2)).unwrap_err();
        assert!(error.contains("65535 × 65535"), "{error}");
    }

    /// Cut anywhere, or with any byte changed: a picture or an error.
    #[test]
    fn damaged_pictures() {
        let picture = DynamicImage::ImageRgb8(colours());
        let mut gif = Vec::new();
        GifEncoder::new(&mut gif)
            .encode_frame(Frame::new(picture.to_rgba8()))
            .unwrap();
        let whole = [
            encoded(&picture, ImageFormat::Png),
            encoded(&picture, ImageFormat::Jpeg),
            encoded(&picture, ImageFormat::WebP),
            encoded(&picture, ImageFormat::Bmp),
            gif,
        ];
        for bytes in whole {
            assert!(decode(&bytes).is_ok());
            for at in 0..bytes.len() {
                let _ = decode(&bytes[..at]);
                let mut bytes = bytes.clone();
                bytes[at] ^= 0x41;
                let _ = decode(&bytes);
            }
        }
        // A checksum that is not that of the data.
        let mut png = encoded(&picture, ImageFormat::Png);
        let at = png.windows(4).position(|bytes| bytes == b"IDAT").unwrap();
        png[at + 8] ^= 1;
        assert!(decode(&png).is_err());
    }

    /// A JPEG is turned as its EXIF data say.
    #[test]
    fn orientation() {
        let jpeg = encoded(
            &DynamicImage::ImageRgb8(RgbImage::new(4, 2)),
            ImageFormat::Jpeg,
        );
        let mut exif =
            b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0".to_vec();
        let mut segment = vec![0xff, 0xe1];
        segment.extend((exif.len() as u16 + 2).to_be_bytes());
        segment.append(&mut exif);
        let turned = [&jpeg[..2], &segment, &jpeg[2..]].concat();
        let size = |bytes: &[u8]| {
            let image = decode(bytes).unwrap();
            (image.width(), image.height())
        };
        assert_eq!((size(&jpeg), size(&turned)), ((4, 2), (2, 4)));
    }
}
