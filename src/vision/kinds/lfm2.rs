//! LFM2-VL (SigLIP 2).

use crate::vision::VisionError;
use crate::vision::file::File;
use crate::vision::kinds::{Sizes, Tower, activation, causal, square_positions, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, JoinOrder, Op};
use crate::vision::positions::TableRule;
use crate::vision::preprocess::Preprocess;

/// Bounds of the tokens of an image or thumbnail, which files do not say.
const TOKENS: (usize, usize) = (64, 256);
/// Epsilon of the projector's norm, which files do not say.
const EPS: f32 = 1e-5;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let k = file.opt_count("projector.scale_factor", 16)?.unwrap_or(2);
    let n = sizes.width * k * k;
    let n_inner = file.n_out("mm.1")?;
    let mut ops = vec![
        Op::Norm(file.norm("v.post_ln", sizes.width, file.eps)?),
        Op::Join {
            k,
            order: JoinOrder::ByPatch,
        },
    ];
    if file.has("mm.input_norm.weight") {
        ops.push(Op::Norm(file.norm("mm.input_norm", n, EPS)?));
    }
    ops.push(Op::Linear(file.linear("mm.1", n, n_inner)?));
    ops.push(Op::Act(Act::GeluErf));
    ops.push(Op::Linear(file.linear("mm.2", n_inner, sizes.n_embd)?));
    let mut vit = vit(
        file,
        sizes,
        sizes.n_ff,
        activation(file, Act::GeluTanh)?,
        ops,
    )?;
    vit.positions = Some(square_positions(file, sizes, TableRule::Antialiased)?);
    Ok(Tower {
        vit,
        preprocess: Preprocess::SmartTiles {
            unit: sizes.patch * k,
            tokens: TOKENS,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Lfm,
        markers: &["<image>"],
        place: "<image>",
        positions: TextPositions::Plain,
        sight: causal,
        newline: None,
    })
}
