//! Sizes to which the authors' image processors bring images. All are `(width, height)`.
//!
//! Where they round to a multiple, exact halves go to the even one, as in Python.

use crate::vision::VisionError;

/// `(width, height)`.
pub(super) type Size = (usize, usize);

fn nearest(x: f64, factor: usize) -> usize {
    (x / factor as f64).round_ties_even() as usize * factor
}

/// How sides become multiples of a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SmartRule {
    /// Qwen 2 VL and later; at most 200 times as long as wide.
    Qwen,
    /// GLM-4V: images shorter than the factor are enlarged first.
    Glm,
    /// LFM2-VL: sides are at least the factor.
    Lfm,
}

/// Multiples of `factor` near the image's own sides, within an area of `least..=most` pixels.
pub(super) fn smart(
    rule: SmartRule,
    size: Size,
    factor: usize,
    (least, most): (usize, usize),
) -> Result<Size, VisionError> {
    let (mut width, mut height) = (size.0 as f64, size.1 as f64);
    let ratio = width.max(height) / width.min(height);
    if rule != SmartRule::Lfm && ratio > 200.0 {
        return Err(VisionError::TooNarrow {
            width: size.0 as u32,
            height: size.1 as u32,
            why: "one side is more than 200 times the other",
        });
    }
    let f = factor as f64;
    if rule == SmartRule::Glm && width.min(height) < f {
        let scale = (f / height).max(f / width);
        (width, height) = ((width * scale).trunc(), (height * scale).trunc());
    }
    let mut near = (nearest(width, factor), nearest(height, factor));
    if rule == SmartRule::Lfm {
        near = (near.0.max(factor), near.1.max(factor));
    }
    let area = near.0 as f64 * near.1 as f64;
    if area > most as f64 {
        let scale = (width * height / most as f64).sqrt();
        let side = |x: f64| ((x / scale / f).floor() as usize * factor).max(factor);
        near = (side(width), side(height));
    } else if area < least as f64 {
        let scale = (least as f64 / (width * height)).sqrt();
        let side = |x: f64| (x * scale / f).ceil() as usize * factor;
        near = (side(width), side(height));
    }
    Ok(near)
}

/// Gemma 4: the area of `max_tokens` squares of `unit` pixels, as far as multiples of it allow.
pub(super) fn filled((width, height): Size, unit: usize, max_tokens: usize) -> Size {
    let (w, h, u) = (width as f64, height as f64, unit as f64);
    let factor = (max_tokens as f64 * u * u / (w * h)).sqrt();
    let side = |x: f64| (factor * x / u).floor() as usize * unit;
    let long = |long: usize, short: usize| (long / short * unit).min(max_tokens * unit).max(unit);
    match (side(w), side(h)) {
        (0, 0) => (unit, unit),
        (0, _) => (unit, long(height, width)),
        (_, 0) => (long(width, height), unit),
        size => size,
    }
}

/// Idefics 3: the longer side is `longest`, the other one even.
pub(super) fn longest_even((width, height): Size, longest: usize) -> Size {
    let ratio = width as f64 / height as f64;
    let even = |x: f64| (x as usize + x as usize % 2).max(1);
    if width >= height {
        (longest, even(longest as f64 / ratio))
    } else {
        (even(longest as f64 * ratio), longest)
    }
}

/// Idefics 3: both sides up to multiples of a tile.
pub(super) fn up_to_tiles((width, height): Size, tile: usize) -> Size {
    let ratio = width as f64 / height as f64;
    let up = |x: usize| x.div_ceil(tile).max(1) * tile;
    if width >= height {
        let width = up(width);
        (width, up((width as f64 / ratio) as usize))
    } else {
        let height = up(height);
        (up((height as f64 * ratio) as usize), height)
    }
}

/// Pixtral: not longer than `longest`, then up to multiples of `unit`.
pub(super) fn up_to_units((width, height): Size, longest: usize, unit: usize) -> Size {
    let ratio = (height as f64 / longest as f64).max(width as f64 / longest as f64);
    let side = |x: usize| {
        let x = if ratio > 1.0 {
            (x as f64 / ratio).floor() as usize
        } else {
            x
        };
        x.max(1).div_ceil(unit) * unit
    };
    (side(width), side(height))
}

/// LLaVA-NeXT: the resolution in which most pixels of the image survive, then with the least
/// waste.
pub(super) fn best_pinpoint((width, height): Size, pinpoints: &[Size]) -> Size {
    let mut best = ((0, usize::MAX), pinpoints[0]);
    for &(w, h) in pinpoints {
        let scale = (w as f64 / width as f64).min(h as f64 / height as f64);
        let kept = (width as f64 * scale) as usize * (height as f64 * scale) as usize;
        let kept = kept.min(width * height);
        let wasted = w * h - kept.min(w * h);
        if kept > best.0.0 || kept == best.0.0 && wasted < best.0.1 {
            best = ((kept, wasted), (w, h));
        }
    }
    best.1
}

/// The largest size of the same shape inside of `target`, the other side rounded by `round`.
pub(super) fn inside((width, height): Size, target: Size, round: fn(f64) -> f64) -> Size {
    let (w, h) = (width as f64, height as f64);
    let (by_width, by_height) = (target.0 as f64 / w, target.1 as f64 / h);
    let side = |x: f64, most: usize| (round(x) as usize).min(most).max(1);
    if by_width < by_height {
        (target.0, side(h * by_width, target.1))
    } else {
        (side(w * by_height, target.0), target.1)
    }
}

/// InternVL, LFM2-VL: the grid of `least..=most` tiles, `(columns, rows)`, whose shape is nearest;
/// at a tie the larger one while the image covers more than half of it.
pub(super) fn nearest_grid(
    (width, height): Size,
    tile: usize,
    (least, most): (usize, usize),
) -> Size {
    let mut grids: Vec<Size> = (1..=most)
        .flat_map(|columns| (1..=most / columns).map(move |rows| (columns, rows)))
        .filter(|(columns, rows)| (least..=most).contains(&(columns * rows)))
        .collect();
    grids.sort_by_key(|(columns, rows)| columns * rows);
    let ratio = width as f64 / height as f64;
    let (mut best, mut difference) = ((1, 1), f64::INFINITY);
    for (columns, rows) in grids {
        let d = (ratio - columns as f64 / rows as f64).abs();
        let half = 0.5 * (tile * tile * columns * rows) as f64;
        if d < difference || d == difference && (width * height) as f64 > half {
            (best, difference) = ((columns, rows), d);
        }
    }
    best
}

/// MiniCPM-V: about the area of a square of `side` pixels, in multiples of `unit`.
pub(super) fn about((width, height): (f64, f64), side: usize, unit: usize) -> Size {
    let ratio = width / height;
    let h = (side as f64 / ratio.sqrt()).trunc();
    let w = (h * ratio).trunc();
    (nearest(w, unit).max(unit), nearest(h, unit).max(unit))
}

/// MiniCPM-V: the grid of slices `(columns, rows)` of an image with more than one square of `side`
/// pixels.
pub(super) fn slices((width, height): Size, side: usize, most: usize) -> Option<Size> {
    let ratio = (width as f64 / height as f64).ln();
    let n = (width * height) as f64 / (side * side) as f64;
    let n = (n.ceil() as usize).min(most);
    if n <= 1 {
        return None;
    }
    let (mut best, mut difference) = ((1, 1), f64::INFINITY);
    for n in [n - 1, n, n + 1] {
        if n == 1 || n > most {
            continue;
        }
        for columns in (1..=n).filter(|columns| n.is_multiple_of(*columns)) {
            let d = (ratio - (columns as f64 / (n / columns) as f64).ln()).abs();
            if d < difference {
                (best, difference) = ((columns, n / columns), d);
            }
        }
    }
    Some(best)
}

/// Llama 4: the canvas of at most `most` tiles that enlarges the image least or, if none can hold
/// it, shrinks it least; the smallest of such.
pub(super) fn canvas((width, height): Size, tile: usize, most: usize) -> Size {
    let (mut larger, mut smaller) = (None::<(f64, Size)>, None::<(f64, Size)>);
    for rows in 1..=most {
        for columns in 1..=most / rows {
            let size = (columns * tile, rows * tile);
            let scale = (size.0 as f64 / width as f64).min(size.1 as f64 / height as f64);
            let area = |(w, h): Size| w * h;
            let better = |old: Option<(f64, Size)>, prefers: fn(f64, f64) -> bool| match old {
                Some((s, of)) => prefers(scale, s) || scale == s && area(size) < area(of),
                None => true,
            };
            if scale >= 1.0 {
                if better(larger, |a, b| a < b) {
                    larger = Some((scale, size));
                }
            } else if better(smaller, |a, b| a > b) {
                smaller = Some((scale, size));
            }
        }
    }
    larger.or(smaller).map_or((tile, tile), |(_, size)| size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smart_sizes() {
        let of = |size| smart(SmartRule::Qwen, size, 16, (2048, 1 << 20)).unwrap();
        // 200 / 16 is 12.5, which is rounded to 12, and 24 / 16 to 2.
        assert_eq!(of((200, 24)), (192, 32));
        assert_eq!(of((17, 13)), (64, 48));
        assert!(smart(SmartRule::Qwen, (1, 10_000), 16, (2048, 1 << 20)).is_err());
        let glm = smart(SmartRule::Glm, (17, 13), 16, (2048, 1 << 20)).unwrap();
        assert_eq!(glm, (64, 48));
    }

    #[test]
    fn grids() {
        assert_eq!(nearest_grid((90, 60), 32, (1, 6)), (3, 2));
        assert_eq!(nearest_grid((20, 150), 32, (1, 6)), (1, 6));
        assert_eq!(slices((90, 60), 64, 9), Some((2, 1)));
        assert_eq!(slices((17, 13), 64, 9), None);
        assert_eq!(canvas((56, 56), 32, 16), (64, 64));
        assert_eq!(canvas((17, 13), 32, 16), (32, 32));
        assert_eq!(
            best_pinpoint(
                (90, 60),
                &[(56, 28), (28, 56), (56, 56), (28, 84), (84, 28)]
            ),
            (56, 56)
        );
    }

    #[test]
    fn sides_are_never_zero() {
        for size in [(1, 65_535), (65_535, 1), (1, 1), (3, 50_000)] {
            let all = [
                filled(size, 48, 280),
                longest_even(size, 96),
                up_to_tiles(longest_even(size, 96), 32),
                up_to_units(size, 112, 16),
                inside(size, (56, 28), f64::ceil),
                about((size.0 as f64, size.1 as f64), 448, 56),
                canvas(size, 336, 16),
                smart(SmartRule::Lfm, size, 32, (65_536, 262_144)).unwrap(),
            ];
            assert!(
                all.iter().all(|&(w, h)| w > 0 && h > 0 && w * h < 1 << 27),
                "{size:?}: {all:?}"
            );
        }
    }
}
