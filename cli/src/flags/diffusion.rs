//! Flags of texts that are made by denoising, with the names of llama.cpp's `llama-diffusion-cli`.

use super::text::TextArgs;
use crate::io::{Failure, note, on_interrupt, paint};
use clap::ValueEnum;
use ruvllm::decode::{DenoiseOptions, Denoiser, Order};
use ruvllm::{Model, SessionError, Tokenizer};
use std::time::{Duration, Instant};

/// Places of a text unless -n says otherwise.
const N_PLACES: usize = 128;

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
    diffusion_visual: bool,
}

/// A text that was denoised.
pub(crate) struct Denoised {
    pub(crate) prompt_ids: Vec<u32>,
    pub(crate) ids: Vec<u32>,
    /// Up to its end: what lies behind that is decided, too.
    pub(crate) text: String,
    pub(crate) n_steps: usize,
    pub(crate) seed: u64,
    pub(crate) took: Duration,
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
    /// Writes what follows `prompt`.
    pub(crate) fn write(
        &self,
        args: &TextArgs,
        (model, tokenizer): (&Model, &Tokenizer),
        prompt: &str,
    ) -> Result<Denoised, Failure> {
        refuse(args)?;
        let options = args.options(model);
        let engine = args.session.engine(model, false, &options, None)?;
        let denoiser = Denoiser::new(&engine)?;
        let cancel = denoiser.cancel_token();
        on_interrupt(move || cancel.cancel())?;
        let sampling = &args.sampling;
        let seed = sampling
            .chain(model.gguf().metadata(), tokenizer, None)?
            .seed();
        let options = self.options(sampling.temp.unwrap_or(0.0), seed);
        let prompt_ids = tokenizer.encode_prompt(prompt);
        let room = model.hparams().n_ctx_train.saturating_sub(prompt_ids.len());
        if room == 0 {
            return Err(Failure::Work(format!(
                "the prompt has {} tokens, and the model reads at most {}",
                prompt_ids.len(),
                model.hparams().n_ctx_train
            )));
        }
        let n = match args.max_tokens() {
            usize::MAX => N_PLACES.min(room),
            n => n.min(room),
        };
        let written = |ids: &[u32]| {
            let end = ids.iter().position(|&id| tokenizer.is_eog(id));
            tokenizer.decode_lossy(&ids[..end.unwrap_or(ids.len())], false)
        };
        let (start, mut n_steps) = (Instant::now(), 0);
        let ids = denoiser.denoise(&prompt_ids, n, &options, &mut |ids| {
            n_steps += 1;
            if self.diffusion_visual {
                let n_open = ids.iter().filter(|&&id| id == denoiser.mask()).count();
                // Of ids that are no text nothing is shown.
                let text = written(ids).unwrap_or_default();
                let line = format!("step {n_steps}, {n_open} open: {text:?}");
                note(paint("2", &line));
            }
            true
        });
        let ids = ids.map_err(|error| match error {
            SessionError::Cancelled => Failure::Interrupted,
            error => error.into(),
        })?;
        let took = start.elapsed();
        Ok(Denoised {
            text: written(&ids)?,
            prompt_ids,
            ids,
            n_steps,
            seed,
            took,
        })
    }

    /// Options of a denoiser.
    fn options(&self, temperature: f32, seed: u64) -> DenoiseOptions {
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

/// Refuses flags of texts that are continued token by token.
fn refuse(args: &TextArgs) -> Result<(), Failure> {
    let given = [
        ("--learn", args.learn.folder.is_some()),
        ("a grammar or schema", args.sampling.has_mask()),
        ("-r", !args.reverse_prompt.is_empty()),
        ("--lora", !args.session.lora.files()?.is_empty()),
        ("drafting (--spec, -md)", args.speculation.is_given()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => Err(Failure::Usage(format!(
            "this model denoises whole texts; {flag} is for models that continue them token by token"
        ))),
        None => Ok(()),
    }
}
