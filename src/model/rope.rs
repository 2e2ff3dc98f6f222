//! Rotary positions of a file.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::rope::spec::{Rope, RopeOrder, RopeScaling, RopeSections};
use crate::model::ModelError;
use crate::model::keys::Keys;

impl Rope {
    /// Rope of a file, for heads of `head_dim`.
    pub(super) fn of(
        keys: &Keys<'_>,
        head_dim: usize,
        n_ctx_train: usize,
    ) -> Result<Rope, ModelError> {
        let is_none = keys.arch == "glm5-next" && keys.opt_u64("rope.dimension_count")? == Some(0);
        let n_dims = match is_none {
            true => 0,
            false => keys
                .opt_count("rope.dimension_count", MAX_HEAD_DIM)?
                .unwrap_or(head_dim),
        };
        if n_dims % 2 != 0 || n_dims > head_dim {
            return Err(ModelError::Inconsistent {
                what: format!("rope rotates {n_dims} dimensions of heads of {head_dim}"),
            });
        }
        let linear = keys.positive("rope.scale_linear")?;
        let factor = keys.positive("rope.scaling.factor")?.or(linear);
        let beta_fast = keys
            .positive("rope.scaling.yarn_beta_fast")?
            .unwrap_or(32.0);
        let beta_slow = keys.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0);
        // No converter writes this key; Hugging Face's configuration of gpt-oss sets it to false.
        let truncate = keys
            .opt_bool("rope.scaling.yarn_truncate")?
            .unwrap_or(keys.arch != "gpt-oss");
        let scaling = match (keys.opt_str("rope.scaling.type")?, factor) {
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (None | Some("none" | "linear"), _) => RopeScaling::None,
            (Some("yarn"), Some(factor)) => RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
            },
            (Some("ntk"), Some(factor)) if n_dims > 2 => RopeScaling::Ntk { factor },
            (Some("dynamic"), Some(factor)) if n_dims > 2 => RopeScaling::Dynamic { factor },
            (Some("longrope" | "su"), _) => RopeScaling::Long,
            (Some(other), _) => {
                return Err(ModelError::OutOfRange {
                    key: format!("{}.rope.scaling.type", keys.arch),
                    value: other.to_owned(),
                    expected: "none, linear, longrope, or with a factor yarn, dynamic or ntk"
                        .into(),
                });
            }
        };
        // Hugging Face's `attention_factor`, in place of YaRN's magnitude.
        let magnitude = match scaling {
            RopeScaling::Yarn { .. } => keys.positive("rope.scaling.yarn_attn_factor")?,
            _ => None,
        };
        Ok(Rope {
            order: RopeOrder::NeoX,
            n_dims,
            theta: keys.positive("rope.freq_base")?.unwrap_or(10000.0),
            scaling,
            n_ctx_orig: keys
                .opt_count("rope.scaling.original_context_length", 1 << 28)?
                .unwrap_or(n_ctx_train),
            attn_factor: keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0)
                * magnitude.unwrap_or(1.0),
            factors: true,
            // Models with a multiplier of YaRN's logarithm (DeepSeek) divide the factor on rotated
            // values by itself, so it is omitted.
            yarn_magnitude: keys
                .number("rope.scaling.yarn_log_multiplier")?
                .is_none_or(|x| x == 0.0)
                && magnitude.is_none(),
            sections: None,
        })
    }

    /// Sections of pairs by axis of an image, where the file has some: the fourth is not used.
    pub(super) fn sections(
        keys: &Keys<'_>,
        interleaved: bool,
    ) -> Result<Option<RopeSections>, ModelError> {
        let Some(list) = keys.list("rope.dimension_sections")? else {
            return Ok(None);
        };
        let n: Vec<usize> = list.iter().map(|&n| n as usize).collect();
        match n[..] {
            [time, row, column] | [time, row, column, 0]
                if n.iter().all(|n| *n <= MAX_HEAD_DIM) && time > 0 =>
            {
                Ok(Some(RopeSections {
                    n: [time, row, column],
                    interleaved,
                }))
            }
            _ => Err(ModelError::OutOfRange {
                key: format!("{}.rope.dimension_sections", keys.arch),
                value: format!("{n:?}"),
                expected: format!("three numbers of up to {MAX_HEAD_DIM} pairs, and a fourth of 0"),
            }),
        }
    }
}
