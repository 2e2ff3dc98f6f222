//! Limits of SwiGLU by layer, in the keys `swiglu_clamp_exp` and `swiglu_clamp_shexp`.

use crate::layers::activation::spec::Activation;
use crate::layers::layer::spec::FfnSpec;
use crate::layers::moe::spec::SharedSpec;
use crate::model::ModelError;
use crate::model::keys::Keys;

/// Limits of the routed experts and of the shared one, 0 for none.
pub(super) fn set(
    keys: &Keys<'_>,
    ffn: &mut [FfnSpec],
    clamped: fn(f32) -> Activation,
) -> Result<(), ModelError> {
    let routed = limits(keys, "swiglu_clamp_exp")?;
    let shared = limits(keys, "swiglu_clamp_shexp")?;
    let layers = ffn.iter_mut().zip(routed).zip(shared);
    for ((ffn, routed), shared) in layers {
        let Some(moe) = ffn.moe_mut() else { continue };
        let before = moe.activation;
        moe.activation = routed.map_or(before, clamped);
        if let Some(SharedSpec { activation, .. }) = &mut moe.shared {
            let of_shared = shared.map_or(before, clamped);
            *activation = (of_shared != moe.activation).then_some(of_shared);
        }
    }
    Ok(())
}

/// The limits of all layers, `None` where there is none.
pub(super) fn limits(keys: &Keys<'_>, key: &str) -> Result<Vec<Option<f32>>, ModelError> {
    if !keys.has_key(key) {
        return Ok(vec![None; keys.n_layer]);
    }
    keys.ignore(key);
    let name = format!("{}.{key}", keys.arch);
    let limit = |limit: f32| match limit {
        0.0 => Ok(None),
        limit if limit.is_finite() && limit > 0.0 => Ok(Some(limit)),
        limit => Err(ModelError::OutOfRange {
            key: name.clone(),
            value: limit.to_string(),
            expected: "finite numbers above 0, or 0 for none".into(),
        }),
    };
    keys.numbers(&name)?.into_iter().map(limit).collect()
}

/// [`Activation::SwiGluClamped`].
pub(super) fn before(limit: f32) -> Activation {
    Activation::SwiGluClamped { limit }
}

/// [`Activation::SwiGluClampedAfter`].
pub(super) fn after(limit: f32) -> Activation {
    Activation::SwiGluClampedAfter { limit }
}
