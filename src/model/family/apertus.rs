//! The Swiss AI Initiative's Apertus: a llama with norms of queries and keys, whose activation has
//! parameters per layer.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let [alpha_p, alpha_n, beta, eps] =
        ["xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"]
            .map(|name| keys.numbers(name));
    let (alpha_p, alpha_n, beta, eps) = (alpha_p?, alpha_n?, beta?, eps?);
    let softplus = |x: f32| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let mut layers = keys.dense(Activation::SquaredRelu)?;
    for (i, layer) in layers.iter_mut().enumerate() {
        if let FfnSpec::Dense(DenseSpec { activation, .. }) = layer {
            *activation = Activation::Xielu {
                alpha_p: softplus(alpha_p[i]),
                alpha_n: beta[i] + softplus(alpha_n[i]),
                beta: beta[i],
                eps: eps[i],
            };
        }
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, layers)?;
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    Ok(h)
}
