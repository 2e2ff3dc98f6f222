//! Gemma 3 (SigLIP) and Gemma 4.

use crate::layers::hparams::Hparams;
use crate::layers::spans::Sight;
use crate::vision::VisionError;
use crate::vision::file::{File, Norm};
use crate::vision::kinds::{Sizes, Tower, activation, divides, positions, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, Op};
use crate::vision::positions::{Pairs, RopeSpec, TableRule};
use crate::vision::preprocess::Preprocess;
use crate::vision::resize::Filter;

/// Widths of the models whose authors let image tokens see earlier ones only.
const CAUSAL: [usize; 2] = [1536, 2560];
/// Tokens of an image, which files do not say.
const MAX_TOKENS: usize = 280;

pub(super) fn gemma3(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let k = file.opt_count("projector.scale_factor", 64)?.unwrap_or(4);
    divides(sizes, k)?;
    let n = sizes.width;
    let ops = vec![
        Op::Norm(file.norm("v.post_ln", n, file.eps)?),
        Op::Pool(k),
        Op::Norm(file.norm("mm.soft_emb_norm", n, file.eps)?),
        Op::Transposed(file.weight("mm.input_projection.weight", sizes.n_embd, n)?),
    ];
    let mut vit = vit(
        file,
        sizes,
        sizes.n_ff,
        activation(file, Act::GeluTanh)?,
        ops,
    )?;
    vit.positions = Some(positions(
        file,
        sizes,
        TableRule::Rows,
        sizes.side().pow(2),
    )?);
    Ok(Tower {
        vit,
        preprocess: Preprocess::Square {
            side: sizes.image,
            filter: Filter::Bilinear,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Between("\n\n<start_of_image>", "<end_of_image>\n\n"),
        markers: &["<start_of_image>"],
        place: "<image_soft_token>",
        positions: TextPositions::Plain,
        sight: |_| Sight::Both,
        newline: None,
    })
}

pub(super) fn gemma4(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let k = file.opt_count("projector.scale_factor", 64)?.unwrap_or(3);
    let n = sizes.width;
    let ops = vec![
        Op::Pool(k),
        Op::Scale((n as f32).sqrt()),
        Op::Norm(Norm::plain(n, file.eps)),
        Op::Linear(file.linear("mm.input_projection", n, sizes.n_embd)?),
    ];
    let mut vit = vit(file, sizes, sizes.n_ff, Act::GeluTanh, ops)?;
    vit.affine = (2.0, -1.0);
    vit.heads.scale = 1.0;
    vit.rope = Some(RopeSpec {
        pairs: Pairs::HalvesOfHalves,
        theta: 100.0,
        row_first: false,
        alternate: false,
        first: 0,
    });
    let n_side = file.n_rows("v.position_embd.weight", 1 << 16)?;
    let table = file.values("v.position_embd.weight", &[n, n_side, 2])?;
    vit.positions = Some(crate::vision::positions::Positions {
        rule: TableRule::Axes,
        table,
        n: n_side,
    });
    for block in &mut vit.blocks {
        block.v_norm = Some(Norm::plain(sizes.head_dim(), file.eps));
    }
    Ok(Tower {
        vit,
        preprocess: Preprocess::Filled {
            unit: sizes.patch * k,
            max_tokens: MAX_TOKENS,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Between("<|image>", "<image|>"),
        markers: &["<|image|>"],
        place: "<|image|>",
        positions: TextPositions::Plain,
        sight: |h: &Hparams| {
            if CAUSAL.contains(&h.n_embd) {
                Sight::Causal
            } else {
                Sight::BothInWindows
            }
        },
        newline: None,
    })
}
