//! InternVL 3.

use crate::vision::VisionError;
use crate::vision::file::File;
use crate::vision::kinds::{Sizes, Tower, activation, causal, class, divides, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, JoinOrder, Op};
use crate::vision::preprocess::Preprocess;
use crate::vision::vit::ClassPlace;

/// Epsilon of the projector's norm, which files do not say.
const EPS: f32 = 1e-5;
/// Most tiles where files do not say.
const TILES: usize = 12;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let k = file.opt_count("projector.scale_factor", 16)?.unwrap_or(2);
    divides(sizes, k)?;
    let (n, n_embd) = (sizes.width * k * k, sizes.n_embd);
    let ops = vec![
        Op::Join {
            k,
            order: JoinOrder::ByPatch,
        },
        Op::Norm(file.norm("mm.model.mlp.0", n, EPS)?),
        Op::Linear(file.linear("mm.model.mlp.1", n, n_embd)?),
        Op::Act(Act::GeluErf),
        Op::Linear(file.linear("mm.model.mlp.3", n_embd, n_embd)?),
    ];
    let mut vit = vit(
        file,
        sizes,
        sizes.n_ff,
        activation(file, Act::GeluErf)?,
        ops,
    )?;
    let (class, positions) = class(file, sizes, ClassPlace::First)?;
    (vit.class, vit.positions) = (Some(class), Some(positions));
    let least = file.opt_count("preproc_min_tiles", 64)?.unwrap_or(1);
    let most = file.opt_count("preproc_max_tiles", 64)?.unwrap_or(TILES);
    Ok(Tower {
        vit,
        preprocess: Preprocess::NearestGrid {
            tile: sizes.image,
            tiles: (least.min(most), most),
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Between("<img>", "</img>"),
        markers: &["<IMG_CONTEXT>"],
        place: "<IMG_CONTEXT>",
        positions: TextPositions::Plain,
        sight: causal,
        newline: None,
    })
}
