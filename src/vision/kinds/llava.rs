//! LLaVA 1.5 and NeXT (CLIP).

use crate::vision::VisionError;
use crate::vision::file::{File, out_of_range};
use crate::vision::kinds::{MAX_TILES, Sizes, Tower, activation, causal, class, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, Op};
use crate::vision::preprocess::Preprocess;
use crate::vision::sizes::Size;
use crate::vision::vit::ClassPlace;
use std::ops::Range;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let n_inner = file.n_out("mm.0")?;
    let ops = vec![
        Op::Linear(file.linear("mm.0", sizes.width, n_inner)?),
        Op::Act(Act::GeluErf),
        Op::Linear(file.linear("mm.2", n_inner, sizes.n_embd)?),
    ];
    let mut vit = vit(
        file,
        sizes,
        sizes.n_ff,
        activation(file, Act::GeluTanh)?,
        ops,
    )?;
    let (class, positions) = class(file, sizes, ClassPlace::First)?;
    (vit.class, vit.positions) = (Some(class), Some(positions));
    let mean = file.channels("image_mean")?;
    let pinpoints = file
        .list("image_grid_pinpoints", 1 << 14)?
        .filter(|list| !list.is_empty());
    let (preprocess, newline) = match pinpoints {
        Some(list) => {
            let key = "image_grid_pinpoints";
            let (pairs, rest) = list.as_chunks::<2>();
            let is_grid = |x: &usize| {
                let n = x / sizes.image;
                x.is_multiple_of(sizes.image) && (1..=MAX_TILES).contains(&n)
            };
            if !rest.is_empty() || pairs.len() > 1 << 10 || !list.iter().all(is_grid) {
                let expected = format!("pairs of multiples of {}", sizes.image);
                return Err(out_of_range(key, format!("{list:?}"), &expected));
            }
            let preprocess = Preprocess::Pinpoints {
                tile: sizes.image,
                pinpoints: pairs
                    .iter()
                    .map(|&[height, width]| (width, height))
                    .collect(),
            };
            let newline = file.values("model.image_newline", &[sizes.n_embd])?;
            (preprocess, Some(newline))
        }
        None => {
            let preprocess = Preprocess::PaddedSquare {
                side: sizes.image,
                colour: mean.map(|x| (x * 255.0) as u8),
            };
            (preprocess, None)
        }
    };
    Ok(Tower {
        vit,
        preprocess,
        mean,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Between("", ""),
        markers: &["<image>"],
        place: "<image>",
        positions: TextPositions::Plain,
        sight: causal,
        newline,
    })
}

/// Embeddings of LLaVA-NeXT: those of the whole picture, then the rows of the grid of all parts
/// without the rows or columns that are only padding, each followed by `newline`. `tiles` has the
/// whole and the parts, of `side × side` embeddings each.
pub(in crate::vision) fn unpadded(
    tiles: &[f32],
    newline: &[f32],
    side: usize,
    grid: Size,
    size: (usize, usize),
) -> Vec<f32> {
    let n = newline.len();
    let (whole, parts) = tiles.split_at(side * side * n);
    let (of_rows, of_columns) = kept(side, grid, size);
    let mut to = whole.to_vec();
    for row in of_rows {
        for column in of_columns.clone() {
            let part = row / side * grid.0 + column / side;
            let i = part * side * side + row % side * side + column % side;
            to.extend_from_slice(&parts[i * n..][..n]);
        }
        to.extend_from_slice(newline);
    }
    to
}

/// Number of embeddings that [`unpadded`] makes.
pub(in crate::vision) fn n_unpadded(side: usize, grid: Size, size: (usize, usize)) -> usize {
    let (rows, columns) = kept(side, grid, size);
    side * side + rows.len() * (columns.len() + 1)
}

/// Rows and columns of all parts that are no padding.
fn kept(
    side: usize,
    (columns, rows): Size,
    (width, height): (usize, usize),
) -> (Range<usize>, Range<usize>) {
    let (all_columns, all_rows) = (columns * side, rows * side);
    let (w, h) = (width as f64, height as f64);
    // Where the image is wider than the grid, rows above and below are padding.
    let cut = |all: usize, other: f64| {
        // The authors round the quotient to 7 digits.
        let kept = ((other * 1e7).round() / 1e7) as usize;
        let padding = all.saturating_sub(kept) / 2;
        padding..all - padding
    };
    if w / h > all_columns as f64 / all_rows as f64 {
        (cut(all_rows, h * (all_columns as f64 / w)), 0..all_columns)
    } else {
        (0..all_rows, cut(all_columns, w * (all_rows as f64 / h)))
    }
}
