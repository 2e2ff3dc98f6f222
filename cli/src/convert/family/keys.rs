//! Metadata keys of a family's files.

use super::spec::{Family, KEYS, Kind, Put};
use crate::convert::config::Config;
use crate::io::Failure;
use ruvllm::gguf::{Array, Value};

/// YaRN's settings that only some models have.
fn yarn_keys(family: &Family, config: &Config, key: Put<'_>) -> Result<(), Failure> {
    // The file has a factor on scores for latent attention only, and no rope's factor beside it.
    let number = |name: &str| Ok::<_, Failure>(config.rope_f32(name)?.filter(|x| *x != 0.0));
    let (of_rope, of_scores) = (number("mscale")?, number("mscale_all_dim")?);
    let known = match (of_rope, of_scores) {
        (_, None) => true,
        (of_rope, Some(of_scores))
            if matches!(family.arch, "deepseek2" | "mistral3" | "mistral4") =>
        {
            of_rope == Some(of_scores)
        }
        (of_rope, _) => of_rope.is_none() || config.rope_f32("attention_factor")?.is_some(),
    };
    if !known {
        return Err(config.refuse(
            "mscale and mscale_all_dim of the rope are something that the file cannot say",
        ));
    }
    // Whether the range is rounded, where it is not what readers take for granted.
    let truncate = config.rope_bool("truncate")?.unwrap_or(true);
    if truncate != (family.arch != "gpt-oss") {
        key("rope.scaling.yarn_truncate", truncate.into());
    }
    Ok(())
}

/// Refuses what the files of `family` cannot say.
fn check_only(family: &Family, config: &Config) -> Result<(), Failure> {
    let Ok(serde_json::Value::Object(only)) = serde_json::from_str(family.only) else {
        unreachable!("{}", family.only)
    };
    for (name, known) in &only {
        let known = known.as_array().map_or(&[][..], Vec::as_slice);
        if let Some((_, found)) = config
            .get(&[name])
            .filter(|(_, found)| !known.iter().any(|known| same(known, found)))
        {
            return Err(config.refuse(format_args!(
                "{name} is {found}, of which files of {} say nothing",
                family.arch
            )));
        }
    }
    match config.rope_type_swa() {
        None => Ok(()),
        Some(kind) => Err(config.refuse(format_args!(
            "rope type {kind} of layers with windows is not known"
        ))),
    }
}

/// Whether values are equal; 1 and 1.0 are.
fn same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    match (a.as_f64(), b.as_f64(), a.as_array(), b.as_array()) {
        (Some(a), Some(b), ..) => a == b,
        (.., Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        _ => a == b,
    }
}

/// Writes the keys of `family`, in the order of the tables; behind the layers are `n_block` blocks
/// for multi-token prediction.
pub(in crate::convert) fn write_keys(
    family: &Family,
    config: &Config,
    (n_layer, n_block): (u32, u32),
    write: &mut dyn FnMut(String, Value),
) -> Result<(), Failure> {
    check_only(family, config)?;
    let mut key = |name: &str, value: Value| {
        // Readers take this base for granted where the key is left out.
        let is_other_base = name == "rope.freq_base" && !matches!(value, Value::F32(10000.0));
        if !family.no_keys.contains(&name) || is_other_base {
            write(format!("{}.{name}", family.arch), value);
        }
    };
    key("block_count", n_layer.saturating_add(n_block).into());
    if n_block > 0 {
        key("nextn_predict_layers", n_block.into());
    }
    for (names, name, kind) in KEYS.iter().chain(family.keys) {
        let value = value_of(config, names, *kind)?;
        if let Some(value) = value {
            key(name, value);
        }
    }
    if let Some(theta) = config.rope_f32("rope_theta")? {
        key("rope.freq_base", theta.into());
    }
    if let Some(theta) = config.rope_theta_swa()? {
        key("rope.freq_base_swa", theta.into());
    }
    match config.rope_type() {
        // `dynamic` changes nothing within the context that the model was trained on. The factors
        // of the others are tensors.
        None | Some("dynamic") => {}
        Some("llama3") if !matches!(family.arch, "phi3" | "gemma4") => {}
        Some("proportional") if family.arch == "gemma4" => {}
        Some("su" | "longrope") if family.arch == "phi3" => {
            key("rope.scaling.type", "longrope".into())
        }
        Some(kind @ ("linear" | "yarn")) => {
            key("rope.scaling.type", kind.into());
            let numbers: [(&str, &str); 5] = [
                ("factor", "factor"),
                ("extrapolation_factor", "yarn_ext_factor"),
                ("attention_factor", "yarn_attn_factor"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            ];
            for (from, to) in numbers {
                if let Some(number) = config.rope_f32(from)? {
                    key(&format!("rope.scaling.{to}"), number.into());
                }
            }
            if kind == "yarn" {
                yarn_keys(family, config, &mut key)?;
            }
            if let Some(n) = config.rope_f32("original_max_position_embeddings")? {
                key("rope.scaling.original_context_length", (n as u32).into());
            }
        }
        Some(kind) => {
            return Err(config.refuse(format_args!(
                "rope type {kind} is not known for {}",
                family.arch
            )));
        }
    }
    (family.more)(config, &mut key)
}

/// The value of a key as `config.json` has it under one of `names`; none where it has none.
fn value_of(config: &Config, names: &[&str], kind: Kind) -> Result<Option<Value>, Failure> {
    Ok(match kind {
        Kind::Count => match config.get(names) {
            // A number for each layer.
            Some((name, value)) if value.is_array() => config
                .opt_counts(&name)?
                .map(|counts| Value::Array(Array::I32(counts))),
            _ => config.opt_u32(names)?.map(Value::from),
        },
        Kind::Number => config.opt_f32(names)?.map(Value::from),
        Kind::Flag => config.opt_bool(names)?.map(Value::from),
        Kind::Gating => match config
            .get(names)
            .map(|(name, value)| (name, value.as_str()))
        {
            None => None,
            Some((_, Some("softmax"))) => Some(1u32.into()),
            Some((_, Some("sigmoid"))) => Some(2u32.into()),
            Some((name, _)) => {
                return Err(config.refuse(format_args!("{name} is neither softmax nor sigmoid")));
            }
        },
        Kind::Sliding => {
            let list = config.opt_strs(names[0])?;
            list.map(|list| {
                Value::Array(Array::Bool(
                    list.iter()
                        .map(|kind| *kind == "sliding_attention")
                        .collect(),
                ))
            })
        }
    })
}
