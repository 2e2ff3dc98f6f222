//! From an image to the pixels that an encoder reads, as the models' authors do it.

use crate::vision::VisionError;
use crate::vision::image::Image;
use crate::vision::resize::{Filter, Rounding, resize, resize_as};
use crate::vision::sizes::{self, Size, SmartRule};

/// Most patches of one tile: bounds the memory of the encoder.
pub(super) const MAX_PATCHES: usize = 1 << 16;

/// Bounds of the number of tokens of an image, for the kinds whose images vary in size. The rest
/// ignores them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ImageOptions {
    /// Least number of tokens. Default: the kind's.
    pub min_tokens: Option<usize>,
    /// Most tokens. Default: the kind's.
    pub max_tokens: Option<usize>,
}

/// How a kind prepares images.
#[derive(Clone, Debug)]
pub(super) enum Preprocess {
    /// Stretched to a square.
    Square { side: usize, filter: Filter },
    /// Padded to a square in a colour, then resized.
    PaddedSquare { side: usize, colour: [u8; 3] },
    /// Sides near the image's own, with bounds in tokens.
    Smart {
        rule: SmartRule,
        unit: usize,
        tokens: (usize, usize),
        filter: Filter,
    },
    /// LFM2-VL: as [`Preprocess::Smart`], but large images are cut into tiles.
    SmartTiles { unit: usize, tokens: (usize, usize) },
    /// Gemma 4.
    Filled { unit: usize, max_tokens: usize },
    /// Pixtral.
    Units { longest: usize, unit: usize },
    /// Idefics 3.
    Enlarged { longest: usize, tile: usize },
    /// LLaVA-NeXT; resolutions are `(width, height)`.
    Pinpoints { tile: usize, pinpoints: Vec<Size> },
    /// InternVL.
    NearestGrid { tile: usize, tiles: (usize, usize) },
    /// MiniCPM-V.
    Slices { side: usize, unit: usize },
    /// Llama 4.
    Canvas { tile: usize },
}

/// Most slices of MiniCPM-V, and most tiles of Llama 4 and LFM2-VL, which files do not say.
const MAX_SLICES: usize = 9;
const MAX_CANVAS: usize = 16;
const LFM_TILES: (usize, usize) = (2, 10);
/// Side of a tile of LFM2-VL.
const LFM_TILE: usize = 512;

/// An image, cut up as its encoder reads it.
#[derive(Debug)]
pub(super) struct Tiles {
    /// In the order of the prompt.
    pub(super) images: Vec<Image>,
    /// Columns and rows of the parts, where there are some besides the whole.
    pub(super) grid: Option<Size>,
}

impl Tiles {
    fn whole(image: Image) -> Tiles {
        Tiles {
            images: vec![image],
            grid: None,
        }
    }

    /// The parts of `image`, row by row.
    fn cut(image: &Image, (columns, rows): Size) -> Vec<Image> {
        let (width, height) = image.size();
        let part = (width / columns, height / rows);
        (0..rows * columns)
            .map(|i| image.crop((i % columns * part.0, i / columns * part.1), part))
            .collect()
    }
}

impl Preprocess {
    /// Whether images vary in their number of tokens, within bounds.
    pub(super) fn is_bounded(&self) -> bool {
        use Preprocess::{Filled, Smart, SmartTiles};
        matches!(self, Smart { .. } | SmartTiles { .. } | Filled { .. })
    }

    /// The bounds of the number of tokens.
    fn bounds(
        options: ImageOptions,
        (least, most): (usize, usize),
    ) -> Result<(usize, usize), VisionError> {
        let invalid = |option, value, expected: String| VisionError::Option {
            option,
            value,
            expected,
        };
        let max = MAX_PATCHES;
        let max_tokens = options
            .max_tokens
            .unwrap_or(most.max(options.min_tokens.unwrap_or(0)));
        if !(1..=max).contains(&max_tokens) {
            return Err(invalid(
                "image-max-tokens",
                max_tokens,
                format!("1 to {max}"),
            ));
        }
        let min_tokens = options.min_tokens.unwrap_or(least.min(max_tokens));
        if min_tokens > max_tokens {
            let expected = format!("at most {max_tokens}, the largest number");
            return Err(invalid("image-min-tokens", min_tokens, expected));
        }
        Ok((min_tokens, max_tokens))
    }

    /// Cuts an image up. Sizes are bounded before anything is computed.
    pub(super) fn tiles(&self, image: &Image, options: ImageOptions) -> Result<Tiles, VisionError> {
        let size = image.size();
        Ok(match *self {
            Preprocess::Square { side, filter } => {
                Tiles::whole(resize(image, (side, side), filter))
            }
            Preprocess::PaddedSquare { side, colour } => {
                let longest = size.0.max(size.1);
                Image::check_size(longest as u32, longest as u32)?;
                let place = ((longest - size.0) / 2, (longest - size.1) / 2);
                let square = image.pad((longest, longest), place, colour);
                Tiles::whole(resize(&square, (side, side), Filter::Bicubic))
            }
            Preprocess::Smart {
                rule,
                unit,
                tokens,
                filter,
            } => {
                let (least, most) = Preprocess::bounds(options, tokens)?;
                let pixels = (least * unit * unit, most * unit * unit);
                Tiles::whole(resize(
                    image,
                    sizes::smart(rule, size, unit, pixels)?,
                    filter,
                ))
            }
            Preprocess::SmartTiles { unit, tokens } => {
                let (least, most) = Preprocess::bounds(options, tokens)?;
                smart_tiles(image, unit, (least, most))?
            }
            Preprocess::Filled { unit, max_tokens } => {
                let (_, most) = Preprocess::bounds(options, (1, max_tokens))?;
                Tiles::whole(resize(
                    image,
                    sizes::filled(size, unit, most),
                    Filter::Bicubic,
                ))
            }
            Preprocess::Units { longest, unit } => {
                let size = sizes::up_to_units(size, longest, unit);
                Tiles::whole(resize(image, size, Filter::Bicubic))
            }
            Preprocess::Enlarged { longest, tile } => enlarged(image, longest, tile),
            Preprocess::Pinpoints {
                tile,
                ref pinpoints,
            } => {
                let target = sizes::best_pinpoint(size, pinpoints);
                let inner = sizes::inside(size, target, f64::ceil);
                let place = ((target.0 - inner.0) / 2, (target.1 - inner.1) / 2);
                let canvas = resize(image, inner, Filter::Bicubic).pad(target, place, [0; 3]);
                let grid = (target.0 / tile, target.1 / tile);
                let mut images = vec![resize(image, (tile, tile), Filter::Bicubic)];
                images.extend(Tiles::cut(&canvas, grid));
                Tiles {
                    images,
                    grid: Some(grid),
                }
            }
            Preprocess::NearestGrid { tile, tiles } => {
                let grid = sizes::nearest_grid(size, tile, tiles);
                let target = (grid.0 * tile, grid.1 * tile);
                let mut images = Tiles::cut(&resize(image, target, Filter::Bicubic), grid);
                if images.len() > 1 {
                    images.push(resize(image, (tile, tile), Filter::Bicubic));
                }
                Tiles {
                    images,
                    grid: Some(grid),
                }
            }
            Preprocess::Slices { side, unit } => sliced(image, side, unit),
            Preprocess::Canvas { tile } => on_canvas(image, tile),
        })
    }
}

/// As torchvision does it: the two kinds whose authors use it.
fn bilinear(image: &Image, size: Size) -> Image {
    resize_as(Rounding::Torch, image, size, Filter::Bilinear)
}

/// LFM2-VL.
fn smart_tiles(image: &Image, unit: usize, tokens: (usize, usize)) -> Result<Tiles, VisionError> {
    let size = image.size();
    let pixels = (tokens.0 * unit * unit, tokens.1 * unit * unit);
    let small = bilinear(image, sizes::smart(SmartRule::Lfm, size, unit, pixels)?);
    // The authors cut only images of more than twice the largest number of tokens.
    let near =
        |x: usize| ((x as f64 / unit as f64).round_ties_even() * unit as f64).max(unit as f64);
    if near(size.0) * near(size.1) <= 2.0 * pixels.1 as f64 {
        return Ok(Tiles::whole(small));
    }
    let grid = sizes::nearest_grid(size, LFM_TILE, LFM_TILES);
    let target = (grid.0 * LFM_TILE, grid.1 * LFM_TILE);
    let mut images = Tiles::cut(&bilinear(image, target), grid);
    images.push(small);
    Ok(Tiles {
        images,
        grid: Some(grid),
    })
}

/// Idefics 3: two enlargements, tiles, then the whole.
fn enlarged(image: &Image, longest: usize, tile: usize) -> Tiles {
    let first = sizes::longest_even(image.size(), longest);
    let second = sizes::up_to_tiles(first, tile);
    let large = resize(
        &resize(image, first, Filter::Lanczos),
        second,
        Filter::Lanczos,
    );
    let grid = (second.0 / tile, second.1 / tile);
    if grid == (1, 1) {
        return Tiles::whole(large);
    }
    let mut images = Tiles::cut(&large, grid);
    images.push(resize(&large, (tile, tile), Filter::Lanczos));
    Tiles {
        images,
        grid: Some(grid),
    }
}

/// MiniCPM-V: the whole, then slices.
fn sliced(image: &Image, side: usize, unit: usize) -> Tiles {
    let (width, height) = image.size();
    let whole = sizes::about((width as f64, height as f64), side, unit);
    let mut images = vec![resize(image, whole, Filter::Bicubic)];
    let grid = sizes::slices((width, height), side, MAX_SLICES);
    if let Some((columns, rows)) = grid {
        let part = |x: usize, n: usize| {
            ((x as f64 / n as f64).round_ties_even() * n as f64).max(n as f64) / n as f64
        };
        let slice = sizes::about((part(width, columns), part(height, rows)), side, unit);
        let target = (slice.0 * columns, slice.1 * rows);
        images.extend(Tiles::cut(
            &resize(image, target, Filter::Bicubic),
            (columns, rows),
        ));
    }
    Tiles { images, grid }
}

/// Llama 4: tiles of a canvas that the image fills from the top left, then the whole.
fn on_canvas(image: &Image, tile: usize) -> Tiles {
    let size = image.size();
    let canvas = sizes::canvas(size, tile, MAX_CANVAS);
    let most = |own: usize, canvas: usize| own.max(tile).min(canvas);
    let target = (most(size.0, canvas.0), most(size.1, canvas.1));
    let inner = sizes::inside(size, target, f64::floor);
    let filled = bilinear(image, inner).pad(canvas, (0, 0), [0; 3]);
    let grid = (canvas.0 / tile, canvas.1 / tile);
    let mut images = Tiles::cut(&filled, grid);
    if images.len() > 1 {
        images.push(bilinear(image, (tile, tile)));
    }
    Tiles {
        images,
        grid: Some(grid),
    }
}

/// Pixels of an image or tile, `(3, height, width)`: `(x / 255 − mean) / std`.
#[derive(Clone, Debug, PartialEq)]
pub struct Pixels {
    /// Pixels per row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Channel by channel, row by row.
    pub values: Vec<f32>,
}

impl Pixels {
    pub(super) fn of(image: &Image, mean: [f32; 3], std: [f32; 3]) -> Pixels {
        let (width, height) = image.size();
        let mut values = Vec::with_capacity(3 * width * height);
        for channel in 0..3 {
            let table: [f32; 256] =
                std::array::from_fn(|x| (x as f32 / 255.0 - mean[channel]) / std[channel]);
            let of_channel = image.rgb().iter().skip(channel).step_by(3);
            values.extend(of_channel.map(|&x| table[usize::from(x)]));
        }
        Pixels {
            width,
            height,
            values,
        }
    }
}
