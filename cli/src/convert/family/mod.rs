//! The families: how each one's configuration and tensors are called at Hugging Face and in GGUF
//! files.
//!
//! Names and values of the GGUF side are those that llama.cpp's `convert_hf_to_gguf.py` writes;
//! `tests/convert.rs` compares with it. Where that leaves out what the configuration says (windows,
//! factors, bases), the key is written only if it says something unusual.

mod deepseek_glm;
mod dense;
mod encoders;
mod gemma;
mod gpt;
mod granite;
mod keys;
mod llama;
mod mixtures;
mod qwen;
mod recurrent;
mod rwkv;
mod spec;

use crate::convert::config::Config;
use crate::io::Failure;
pub(super) use keys::write_keys;
use spec::{
    EXPERT_KEYS, PLAIN, Put, SHARED_EXPERTS, WINDOW, decays, halves, has_experts, no_scaling,
    normalised, norms_plus_one, partial_rope, rope_dimensions, window_pattern,
};
pub(super) use spec::{
    Extra, Factor, Family, Key, Kind, Map, NAMES, Parts, Reorder, Run, Spaces, Transpose,
};

/// Every family that can be converted, a list for each file; of those that are called the same the
/// first that fits counts.
static FAMILIES: &[&[Family]] = &[
    llama::FAMILIES,
    granite::FAMILIES,
    qwen::FAMILIES,
    gemma::FAMILIES,
    deepseek_glm::FAMILIES,
    dense::FAMILIES,
    gpt::FAMILIES,
    mixtures::FAMILIES,
    recurrent::FAMILIES,
    rwkv::FAMILIES,
    encoders::FAMILIES,
];

/// The first of `hf` that is known.
pub(super) fn by_name(config: &Config) -> Result<&'static Family, Failure> {
    let names = config.opt_strs("architectures")?.unwrap_or_default();
    let all = || FAMILIES.iter().copied().flatten();
    let fits = |name: &str, family: &Family| family.hf.contains(&name) && (family.fits)(config);
    let family = names
        .iter()
        .find_map(|name| all().find(|family| fits(name, family)));
    family.ok_or_else(|| {
        let known: Vec<&str> = all().flat_map(|family| family.hf).copied().collect();
        config.refuse(format_args!(
            "architectures is {names:?}, and there are {}",
            known.join(", ")
        ))
    })
}
