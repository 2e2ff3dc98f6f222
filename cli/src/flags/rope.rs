//! Flags that stretch positions, by llama.cpp's names: other values of the model's metadata.

use clap::{Args, ValueEnum};
use ruvllm::gguf::Value;

/// How positions are stretched.
#[derive(Clone, Copy, ValueEnum)]
enum Scaling {
    None,
    Linear,
    Yarn,
    /// By how much the context is longer than the trained one, as in Hugging Face
    Dynamic,
    /// NTK-aware
    Ntk,
    Longrope,
}

/// Rope scaling.
#[derive(Args, Default)]
#[command(next_help_heading = "Longer contexts (rope scaling)")]
pub(crate) struct RopeArgs {
    /// How rope frequencies are stretched beyond the trained context [default: as the model says]
    #[arg(long, value_enum, env = "LLAMA_ARG_ROPE_SCALING_TYPE")]
    rope_scaling: Option<Scaling>,
    /// How many times longer the context becomes
    #[arg(
        long,
        value_name = "N",
        env = "LLAMA_ARG_ROPE_SCALE",
        conflicts_with = "rope_freq_scale"
    )]
    rope_scale: Option<f32>,
    /// Base of rope frequencies [default: the model's]
    #[arg(long, value_name = "N", env = "LLAMA_ARG_ROPE_FREQ_BASE")]
    rope_freq_base: Option<f32>,
    /// Factor on rope frequencies: 1 divided by --rope-scale
    #[arg(long, value_name = "N", env = "LLAMA_ARG_ROPE_FREQ_SCALE")]
    rope_freq_scale: Option<f32>,
    /// Context that the model was trained for before it was stretched [default: the model's]
    #[arg(long, value_name = "N", env = "LLAMA_ARG_YARN_ORIG_CTX")]
    yarn_orig_ctx: Option<u32>,
    /// How much YaRN extrapolates; only 1 is computed
    #[arg(long, value_name = "N", env = "LLAMA_ARG_YARN_EXT_FACTOR")]
    yarn_ext_factor: Option<f32>,
    /// Factor on rotated queries and keys
    #[arg(long, value_name = "N", env = "LLAMA_ARG_YARN_ATTN_FACTOR")]
    yarn_attn_factor: Option<f32>,
    /// Turns over the original context below which YaRN interpolates
    #[arg(long, value_name = "N", env = "LLAMA_ARG_YARN_BETA_SLOW")]
    yarn_beta_slow: Option<f32>,
    /// Turns over the original context above which YaRN keeps frequencies
    #[arg(long, value_name = "N", env = "LLAMA_ARG_YARN_BETA_FAST")]
    yarn_beta_fast: Option<f32>,
}

impl RopeArgs {
    /// Metadata of a model of this architecture that takes the place of its own.
    pub(crate) fn overrides(&self, arch: &str) -> Vec<(String, Value)> {
        let scaling = self.rope_scaling.and_then(|scaling| {
            let name = scaling.to_possible_value()?.get_name().to_owned();
            Some(Value::String(name))
        });
        let factor = self.rope_scale.or(self.rope_freq_scale.map(|x| 1.0 / x));
        let number = |x: Option<f32>| x.map(Value::F32);
        [
            ("rope.scaling.type", scaling),
            ("rope.scaling.factor", number(factor)),
            ("rope.freq_base", number(self.rope_freq_base)),
            (
                "rope.scaling.original_context_length",
                self.yarn_orig_ctx.map(Value::U32),
            ),
            ("rope.scaling.yarn_ext_factor", number(self.yarn_ext_factor)),
            ("rope.scaling.attn_factor", number(self.yarn_attn_factor)),
            ("rope.scaling.yarn_beta_slow", number(self.yarn_beta_slow)),
            ("rope.scaling.yarn_beta_fast", number(self.yarn_beta_fast)),
        ]
        .into_iter()
        .filter_map(|(key, value)| Some((format!("{arch}.{key}"), value?)))
        .collect()
    }
}
