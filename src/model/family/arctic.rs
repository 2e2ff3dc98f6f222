//! Snowflake's Arctic: a dense layer as wide as the residual stream, and beside it a mixture that
//! reads what the layer's attention reads.

use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{BesideSpec, FfnSpec};
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let n_ff = keys.count("embedding_length", 1 << 17)?;
    let mut ffn = keys.mixture(0, true)?;
    for ffn in &mut ffn {
        if let FfnSpec::Moe(moe) = ffn {
            let dense = DenseSpec {
                n_ff,
                ..DenseSpec::default()
            };
            let beside = BesideSpec {
                reads_input: true,
                scale: 1.0,
            };
            *ffn = FfnSpec::Beside(dense, moe.clone(), beside);
        }
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    h.ropes[0].order = RopeOrder::Norm;
    Ok(h)
}
