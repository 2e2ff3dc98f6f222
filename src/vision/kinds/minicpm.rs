//! MiniCPM-V 4.6.

use crate::vision::VisionError;
use crate::vision::file::{File, out_of_range};
use crate::vision::kinds::{Sizes, Tower, activation, causal, square_positions, vit};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, JoinOrder, Op};
use crate::vision::positions::TableRule;
use crate::vision::preprocess::Preprocess;
use crate::vision::vit::Merger;

pub(super) fn bind(file: &File<'_>, sizes: &Sizes) -> Result<Tower, VisionError> {
    let n = sizes.width;
    let n_inner = file.n_out("mm.up")?;
    let ops = vec![
        Op::Norm(file.norm("v.post_ln", n, file.eps)?),
        Op::Join {
            k: 2,
            order: JoinOrder::ByPatch,
        },
        Op::Norm(file.norm("mm.input_norm", 4 * n, file.eps)?),
        Op::Linear(file.linear("mm.up", 4 * n, n_inner)?),
        Op::Act(Act::GeluErf),
        Op::Linear(file.linear("mm.down", n_inner, sizes.n_embd)?),
    ];
    let mut vit = vit(
        file,
        sizes,
        sizes.n_ff,
        activation(file, Act::GeluTanh)?,
        ops,
    )?;
    vit.positions = Some(square_positions(file, sizes, TableRule::Buckets)?);
    let after = file.list("wa_layer_indexes", 1 << 10)?.unwrap_or_default();
    let [after] = after[..] else {
        return Err(out_of_range(
            "wa_layer_indexes",
            format!("{after:?}"),
            "one layer",
        ));
    };
    let linear =
        |part: &str, n_in, n_out| file.linear(&format!("v.vit_merger.{part}"), n_in, n_out);
    let n_ff = file.n_out("v.vit_merger.ds_ffn_up")?;
    vit.merger = Some(Merger {
        after,
        norm: file.norm("v.vit_merger.ln1", n, file.eps)?,
        qkv: [
            linear("attn_q", n, n)?,
            linear("attn_k", n, n)?,
            linear("attn_v", n, n)?,
        ],
        out: linear("attn_out", n, n)?,
        ops: vec![
            Op::Widen(4),
            Op::Norm(file.norm("v.vit_merger.ds_ln", 4 * n, file.eps)?),
            Op::Linear(linear("ds_ffn_up", 4 * n, n_ff)?),
            Op::Act(Act::GeluTanh),
            Op::Linear(linear("ds_ffn_down", n_ff, n)?),
        ],
    });
    Ok(Tower {
        vit,
        preprocess: Preprocess::Slices {
            side: sizes.image,
            unit: 4 * sizes.patch,
        },
        mean: file.channels("image_mean")?,
        std: file.channels("image_std")?,
        order: (2, 1),
        layout: Layout::MiniCpm,
        markers: &["<|image_pad|>"],
        place: "<|image_pad|>",
        positions: TextPositions::Plain,
        sight: causal,
        newline: None,
    })
}
