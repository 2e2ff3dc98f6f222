//! Texts of models that denoise: the whole text at once, step by step.

use super::Args;
use crate::flags::no_tokenizer;
use crate::io::{Failure, milliseconds, note, on_interrupt, paint, per_second, print, print_json};
use ruvllm::Model;
use ruvllm::decode::Denoiser;
use serde_json::json;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// Places of a text unless -n says otherwise.
const N_PLACES: usize = 128;

pub(super) fn run(args: &Args, model: &Model, prompt: &str, load: Duration) -> Result<(), Failure> {
    refuse(args)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let (text, sampling) = (&args.text, &args.text.sampling);
    let engine = text
        .session
        .engine(model, false, &text.options(model), None)?;
    let denoiser = Denoiser::new(&engine)?;
    let cancel = denoiser.cancel_token();
    on_interrupt(move || cancel.cancel())?;
    let seed = sampling.chain(model.gguf().metadata(), tokenizer)?.seed();
    let options = args.diffusion.options(sampling.temp.unwrap_or(0.0), seed);
    let prompt_ids = tokenizer.encode_prompt(prompt);
    let room = model.hparams().n_ctx_train.saturating_sub(prompt_ids.len());
    let n = match text.max_tokens() {
        usize::MAX => N_PLACES.min(room),
        n => n,
    };
    // What lies behind the end is decided, too, and no part of the text.
    let written = |ids: &[u32]| {
        let end = ids.iter().position(|&id| tokenizer.is_eog(id));
        tokenizer.decode_lossy(&ids[..end.unwrap_or(ids.len())], false)
    };
    let (start, mut n_steps) = (Instant::now(), 0);
    let ids = denoiser.denoise(&prompt_ids, n, &options, &mut |ids| {
        n_steps += 1;
        if args.diffusion.diffusion_visual {
            let n_open = ids.iter().filter(|&&id| id == denoiser.mask()).count();
            // Of ids that are no text nothing is shown.
            let text = written(ids).unwrap_or_default();
            note(paint(
                "2",
                &format!("step {n_steps}, {n_open} open: {text:?}"),
            ));
        }
        true
    })?;
    let took = start.elapsed();
    let text = written(&ids)?;
    if args.json {
        return print_json(&json!({
            "model": args.model.label(),
            "prompt": prompt,
            "prompt_ids": prompt_ids,
            "ids": ids,
            "text": text,
            "seed": seed,
            "timings": {
                "load_ms": milliseconds(load),
                "diffusion_steps": n_steps,
                "predicted_n": ids.len(),
                "predicted_ms": milliseconds(took),
                "predicted_per_second": per_second(ids.len(), took),
            },
        }));
    }
    if !args.no_display_prompt {
        super::eprint_text(prompt);
    }
    print(&text)?;
    if !text.ends_with('\n') {
        print("\n")?;
    }
    if args.text.verbose || io::stderr().is_terminal() {
        note(paint(
            "2",
            &format!(
                "load {:.0} ms; {n_steps} steps, {} tokens, {:.1}/s; seed {seed}",
                milliseconds(load),
                ids.len(),
                per_second(ids.len(), took)
            ),
        ));
    }
    Ok(())
}

/// Refuses flags of texts that are continued token by token.
fn refuse(args: &Args) -> Result<(), Failure> {
    let text = &args.text;
    let given = [
        ("--learn", text.learn.folder.is_some()),
        ("a grammar or schema", text.sampling.has_mask()),
        ("-r", !text.reverse_prompt.is_empty()),
        ("--lora", !text.session.lora.files()?.is_empty()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => Err(Failure::Usage(format!(
            "this model denoises whole texts; {flag} is for models that continue them token by token"
        ))),
        None => Ok(()),
    }
}
