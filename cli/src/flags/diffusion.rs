//! Flags of texts that are made by denoising, with the names of llama.cpp's `llama-diffusion-cli`.

use crate::io::Failure;
use clap::ValueEnum;
use ruvllm::decode::{DenoiseOptions, Order};

/// How a model that denoises whole texts writes one (Dream, LLaDA, RND1); other models have no use
/// for it.
#[derive(clap::Args)]
#[command(next_help_heading = "Denoising")]
pub(crate) struct DiffusionArgs {
    /// Steps, of which each computes the whole text [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    diffusion_steps: Option<u32>,
    /// Places of a block; blocks are decided one after the other [default: all places are one]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    diffusion_block_length: Option<u32>,
    /// Which places are decided first: 1 or entropy, 2 or margin, 3 or random, 4 or confidence
    /// [default: 4]
    #[arg(long, value_name = "N", value_enum, hide_possible_values = true)]
    diffusion_algorithm: Option<Algorithm>,
    /// Show the text after every step on stderr
    #[arg(long)]
    pub(crate) diffusion_visual: bool,
}

/// Which places are decided first, by llama.cpp's numbers.
#[derive(Clone, Copy, ValueEnum)]
enum Algorithm {
    #[value(alias = "1")]
    Entropy,
    #[value(alias = "2")]
    Margin,
    #[value(alias = "3")]
    Random,
    #[value(alias = "4")]
    Confidence,
}

impl DiffusionArgs {
    /// Options of a denoiser.
    pub(crate) fn options(&self, temperature: f32, seed: u64) -> DenoiseOptions {
        let mut options = DenoiseOptions::default();
        if let Some(n) = self.diffusion_steps {
            options.n_steps = n as usize;
        }
        options.block = self.diffusion_block_length.map(|n| n as usize);
        options.order = match self.diffusion_algorithm {
            Some(Algorithm::Entropy) => Order::Entropy,
            Some(Algorithm::Margin) => Order::Margin,
            Some(Algorithm::Random) => Order::Random,
            Some(Algorithm::Confidence) | None => Order::Confidence,
        };
        (options.temperature, options.seed) = (temperature, seed);
        options
    }

    /// Refuses these flags for a model that does not denoise.
    pub(crate) fn none(&self) -> Result<(), Failure> {
        let given = [
            ("--diffusion-steps", self.diffusion_steps.is_some()),
            (
                "--diffusion-block-length",
                self.diffusion_block_length.is_some(),
            ),
            ("--diffusion-algorithm", self.diffusion_algorithm.is_some()),
            ("--diffusion-visual", self.diffusion_visual),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => Err(Failure::Usage(format!(
                "{flag} is for models that denoise whole texts (Dream, LLaDA, RND1), which this one does not"
            ))),
            None => Ok(()),
        }
    }
}
