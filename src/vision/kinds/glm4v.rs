//! GLM-4V.

use crate::vision::VisionError;
use crate::vision::file::File;
use crate::vision::kinds::qwen::{ROPE, TOKENS};
use crate::vision::kinds::{Sizes, Tower, causal, square_positions, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, Op};
use crate::vision::positions::TableRule;
use crate::vision::preprocess::Preprocess;
use crate::vision::resize::Filter;
use crate::vision::sizes::SmartRule;

const MERGE: usize = 2;
/// Epsilon of the projector's norm, which files do not say.
const EPS: f32 = 1e-5;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    // Files say the projector's width; that of the layers is the tensors'.
    let (n, n_ff, n_block) = (sizes.n_embd, sizes.n_ff, file.n_out("v.blk.0.ffn_up")?);
    let ops = vec![
        Op::Norm(file.norm("v.post_ln", sizes.width, file.eps)?),
        Op::WidenByChannel(MERGE * MERGE),
        Op::Linear(file.shaped_linear("mm.patch_merger", &[MERGE, MERGE, sizes.width], n)?),
        Op::Linear(file.linear("mm.model.fc", n, n)?),
        Op::Norm(file.norm("mm.post_norm", n, EPS)?),
        Op::Act(Act::GeluErf),
        Op::Gated {
            gate: file.linear("mm.gate", n, n_ff)?,
            up: file.linear("mm.up", n, n_ff)?,
            act: Act::Silu,
        },
        Op::Linear(file.linear("mm.down", n_ff, n)?),
    ];
    let mut vit = vit(file, sizes, n_block, Act::Silu, ops)?;
    vit.rope = Some(ROPE);
    vit.patch_norm = file.opt_norm("v.norm_embd", sizes.width)?;
    vit.positions = Some(square_positions(file, sizes, TableRule::Bicubic)?);
    Ok(Tower {
        vit,
        preprocess: Preprocess::Smart {
            rule: SmartRule::Glm,
            unit: sizes.patch * MERGE,
            tokens: TOKENS,
            filter: Filter::Bicubic,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (MERGE, 1),
        layout: Layout::Between("<|begin_of_image|>", "<|end_of_image|>"),
        markers: &["<|begin_of_image|><|image|><|end_of_image|>", "<|image|>"],
        place: "<|image|>",
        positions: TextPositions::Grid,
        sight: causal,
        newline: None,
    })
}
