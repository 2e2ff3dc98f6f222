//! Pixtral and Mistral 3.

use crate::vision::VisionError;
use crate::vision::file::File;
use crate::vision::kinds::{Sizes, Tower, activation, causal, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, JoinOrder, Op};
use crate::vision::positions::{Pairs, RopeSpec};
use crate::vision::preprocess::Preprocess;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let n = sizes.width;
    let k = file.opt_count("spatial_merge_size", 16)?.unwrap_or(1);
    let mut ops = Vec::new();
    if file.has("mm.input_norm.weight") {
        ops.push(Op::Norm(file.norm("mm.input_norm", n, file.eps)?));
    }
    if file.has("mm.patch_merger.weight") {
        ops.push(Op::Join {
            k,
            order: JoinOrder::ByChannel,
        });
        ops.push(Op::Linear(file.linear("mm.patch_merger", n * k * k, n)?));
    }
    let n_inner = file.n_out("mm.1")?;
    ops.push(Op::Linear(file.linear("mm.1", n, n_inner)?));
    ops.push(Op::Act(Act::GeluErf));
    ops.push(Op::Linear(file.linear("mm.2", n_inner, sizes.n_embd)?));
    let mut vit = vit(file, sizes, sizes.n_ff, activation(file, Act::Silu)?, ops)?;
    vit.rope = Some(RopeSpec {
        pairs: Pairs::Neighbours,
        theta: 10000.0,
        row_first: true,
        alternate: true,
        first: 0,
    });
    // The model's own table has the embedding of the token that ends a row.
    file.skip("v.token_embd.img_break");
    Ok(Tower {
        vit,
        preprocess: Preprocess::Units {
            longest: sizes.image,
            unit: sizes.patch * k,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Rows,
        markers: &["[IMG]"],
        place: "[IMG]",
        positions: TextPositions::Plain,
        sight: causal,
        newline: None,
    })
}
