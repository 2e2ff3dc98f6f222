//! Qwen 2, 2.5 and 3 VL.

use crate::vision::VisionError;
use crate::vision::file::{File, Norm, out_of_range};
use crate::vision::kinds::{Sizes, Tower, activation, causal, square_positions, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, Op};
use crate::vision::positions::{Pairs, RopeSpec, TableRule};
use crate::vision::preprocess::Preprocess;
use crate::vision::resize::Filter;
use crate::vision::sizes::SmartRule;
use crate::vision::vit::Vit;

/// Bounds of the tokens of an image, which files do not say.
pub(super) const TOKENS: (usize, usize) = (8, 4096);
/// Side of a window of Qwen 2.5 VL, in pixels.
const WINDOW: usize = 112;
/// Patches per side that are merged.
const MERGE: usize = 2;

/// Halves of the pairs turn by row and column.
pub(super) const ROPE: RopeSpec = RopeSpec {
    pairs: Pairs::Halves,
    theta: 10000.0,
    row_first: true,
    alternate: false,
    first: 0,
};

/// The merger: a norm of each patch, four of them side by side, two matrices.
fn merger(file: &File<'_>, sizes: &Sizes, norm: Norm) -> Result<Vec<Op>, VisionError> {
    let n = sizes.width * MERGE * MERGE;
    Ok(vec![
        Op::Norm(norm),
        Op::Widen(MERGE * MERGE),
        Op::Linear(file.linear("mm.0", n, n)?),
        Op::Act(Act::GeluErf),
        Op::Linear(file.linear("mm.2", n, sizes.n_embd)?),
    ])
}

fn tower(file: &File<'_>, sizes: &Sizes, mut vit: Vit) -> Result<Tower, VisionError> {
    vit.rope = Some(ROPE);
    Ok(Tower {
        vit,
        preprocess: Preprocess::Smart {
            rule: SmartRule::Qwen,
            unit: sizes.patch * MERGE,
            tokens: TOKENS,
            filter: Filter::Bicubic,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (MERGE, 1),
        layout: Layout::Between("<|vision_start|>", "<|vision_end|>"),
        markers: &[
            "<|vision_start|><|image_pad|><|vision_end|>",
            "<|image_pad|>",
        ],
        place: "<|image_pad|>",
        positions: TextPositions::Grid,
        sight: causal,
        newline: None,
    })
}

/// Files say the width of the model in place of that of the feed-forward layers.
pub(super) fn qwen2(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let n_ff = file
        .n_out("v.blk.0.ffn_up")?
        .max(file.n_out("v.blk.0.ffn_down")?);
    let ops = merger(file, sizes, file.norm("v.post_ln", sizes.width, file.eps)?)?;
    let vit = vit(file, sizes, n_ff, activation(file, Act::GeluErf)?, ops)?;
    tower(file, sizes, vit)
}

pub(super) fn qwen25(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let ops = merger(file, sizes, file.norm("v.post_ln", sizes.width, file.eps)?)?;
    let mut vit = vit(file, sizes, sizes.n_ff, Act::Silu, ops)?;
    if let Some(every) = file.opt_count("n_wa_pattern", 1 << 10)? {
        for (i, block) in vit.blocks.iter_mut().enumerate() {
            block.windowed = !(i + 1).is_multiple_of(every);
        }
    } else if let Some(whole) = file.list("fullatt_block_indexes", 1 << 10)? {
        for (i, block) in vit.blocks.iter_mut().enumerate() {
            block.windowed = !whole.contains(&i);
        }
    }
    let mut tower = tower(file, sizes, vit)?;
    tower.order = (MERGE, (WINDOW / (sizes.patch * MERGE)).max(1));
    Ok(tower)
}

pub(super) fn qwen3(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let merge = file.opt_count("spatial_merge_size", 16)?.unwrap_or(MERGE);
    if merge != MERGE {
        return Err(out_of_range("spatial_merge_size", merge, "2"));
    }
    let ops = merger(file, sizes, file.norm("v.post_ln", sizes.width, file.eps)?)?;
    let mut vit = vit(
        file,
        sizes,
        sizes.n_ff,
        activation(file, Act::GeluTanh)?,
        ops,
    )?;
    vit.positions = Some(square_positions(file, sizes, TableRule::Corners)?);
    let n = sizes.width * MERGE * MERGE;
    let flags = file.flags("is_deepstack_layers")?.unwrap_or_default();
    for (i, _) in flags
        .iter()
        .enumerate()
        .filter(|(i, deep)| **deep && *i < sizes.n_layer)
    {
        let name = |part: &str| format!("v.deepstack.{i}.{part}");
        let ops = vec![
            Op::Widen(MERGE * MERGE),
            Op::Norm(file.norm(&name("norm"), n, file.eps)?),
            Op::Linear(file.linear(&name("fc1"), n, n)?),
            Op::Act(Act::GeluErf),
            Op::Linear(file.linear(&name("fc2"), n, sizes.n_embd)?),
        ];
        vit.deepstack.push((i, ops));
    }
    tower(file, sizes, vit)
}
