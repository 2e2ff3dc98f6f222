//! Llama 4.

use crate::vision::VisionError;
use crate::vision::file::File;
use crate::vision::kinds::{Sizes, Tower, activation, causal, class, divides, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, JoinOrder, Op};
use crate::vision::positions::{Pairs, RopeSpec};
use crate::vision::preprocess::Preprocess;
use crate::vision::vit::ClassPlace;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let k = file.opt_count("projector.scale_factor", 16)?.unwrap_or(2);
    divides(sizes, k)?;
    let n = sizes.width * k * k;
    let (first, second) = (file.n_out("mm.model.mlp.1")?, file.n_out("mm.model.mlp.2")?);
    let ops = vec![
        Op::Norm(file.norm("v.post_ln", sizes.width, file.eps)?),
        Op::Join {
            k,
            order: JoinOrder::ByPatch,
        },
        Op::Linear(file.linear("mm.model.mlp.1", n, first)?),
        Op::Act(Act::GeluErf),
        Op::Linear(file.linear("mm.model.mlp.2", first, second)?),
        Op::Act(Act::GeluErf),
        Op::Linear(file.linear("mm.model.fc", second, sizes.n_embd)?),
    ];
    let mut vit = vit(
        file,
        sizes,
        sizes.n_ff,
        activation(file, Act::GeluErf)?,
        ops,
    )?;
    let (class, positions) = class(file, sizes, ClassPlace::Last)?;
    (vit.class, vit.positions) = (Some(class), Some(positions));
    vit.rope = Some(RopeSpec {
        pairs: Pairs::Neighbours,
        theta: 10000.0,
        row_first: false,
        alternate: false,
        first: 1,
    });
    Ok(Tower {
        vit,
        preprocess: Preprocess::Canvas { tile: sizes.image },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Llama4,
        markers: &["<|image|>"],
        place: "<|patch|>",
        positions: TextPositions::Plain,
        sight: causal,
        newline: None,
    })
}
