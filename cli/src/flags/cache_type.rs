//! Flags of the precision of keys and values.

use clap::Args;
use ruvllm::KvType;
use ruvllm::SessionOptions;
use ruvllm::kv::KvTiers;

/// Precision of keys and values.
#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub(crate) struct CacheTypeArgs {
    /// Type of keys in the KV cache: f32, f16, bf16, q8_0, q6_0, q5_0 or q4_0 [default: f16; for
    /// `logits` f32] [short: -ctk]. q8_0 halves them at no measurable loss; q4_0 can cost 5 % of perplexity,
    /// --kv-tiers less than 1
    #[arg(long, value_name = "TYPE", env = "LLAMA_ARG_CACHE_TYPE_K")]
    pub(super) cache_type_k: Option<KvType>,
    /// Type of values in the KV cache, less sensitive than keys [default: f16; for `logits` f32] [short: -ctv]
    #[arg(long, value_name = "TYPE", env = "LLAMA_ARG_CACHE_TYPE_V")]
    pub(super) cache_type_v: Option<KvType>,
    /// Keep the first page and the last RECENT tokens in f16, up to MIDDLE back in q8_0, the rest
    /// in q4_0
    #[arg(long, value_name = "RECENT,MIDDLE", num_args = 0..=1, require_equals = true,
        default_missing_value = "256,2048", value_parser = tiers)]
    pub(super) kv_tiers: Option<KvTiers>,
}

fn tiers(text: &str) -> Result<KvTiers, String> {
    let numbers = text
        .split_once(',')
        .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (recent, middle) = numbers.ok_or("expected two numbers of tokens, as in 256,2048")?;
    Ok(KvTiers { recent, middle })
}

impl CacheTypeArgs {
    /// Sets what the flags say in `options`, `default` where they are not given.
    pub(crate) fn apply(&self, default: KvType, options: &mut SessionOptions) {
        // Precision by age begins with half precision, whatever a program's default is.
        let default = if self.kv_tiers.is_some() {
            KvType::F16
        } else {
            default
        };
        options.kv_type = self.cache_type_k.unwrap_or(default);
        options.kv_type_v = Some(self.cache_type_v.unwrap_or(default));
        options.kv_tiers = self.kv_tiers;
    }
}
