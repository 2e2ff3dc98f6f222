//! Idefics 3 and SmolVLM.

use crate::vision::VisionError;
use crate::vision::file::{File, out_of_range};
use crate::vision::kinds::{MAX_TILES, Sizes, Tower, activation, causal, divides, positions, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, JoinOrder, Op};
use crate::vision::positions::TableRule;
use crate::vision::preprocess::Preprocess;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let k = file.count("projector.scale_factor", 16)?;
    divides(sizes, k)?;
    let ops = vec![
        Op::Norm(file.norm("v.post_ln", sizes.width, file.eps)?),
        Op::Join {
            k,
            order: JoinOrder::ByPatch,
        },
        Op::Linear(file.linear("mm.model.fc", sizes.width * k * k, sizes.n_embd)?),
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
    let key = "preproc_image_size";
    let longest = file.opt_count(key, 1 << 12)?.unwrap_or(4 * sizes.image);
    if longest > MAX_TILES * sizes.image {
        let expected = format!("at most {MAX_TILES} tiles of {}", sizes.image);
        return Err(out_of_range(key, longest, &expected));
    }
    Ok(Tower {
        vit,
        preprocess: Preprocess::Enlarged {
            longest,
            tile: sizes.image,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (1, 1),
        layout: Layout::Idefics,
        markers: &["<image>"],
        place: "<image>",
        positions: TextPositions::Plain,
        sight: causal,
        newline: None,
    })
}
