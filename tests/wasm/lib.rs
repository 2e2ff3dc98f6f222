//! What JavaScript calls: bytes go in through [`input`], text comes out through [`output`].

use ruvllm::gguf::Gguf;
use ruvllm::{Model, Sampler, SamplerOptions};
use ruvllm_learn::{Learner, LearnerOptions, Learning};
use std::error::Error;
use std::sync::Mutex;

struct Host {
    input: Vec<u8>,
    output: String,
    model: Option<Model>,
}

static HOST: Mutex<Host> = Mutex::new(Host {
    input: Vec::new(),
    output: String::new(),
    model: None,
});

/// Runs `f`, keeps its text for [`output`], and says whether it worked; if not, the text says why.
fn answer(f: impl FnOnce(&mut Host) -> Result<String, Box<dyn Error>>) -> bool {
    let mut host = HOST.lock().unwrap_or_else(|e| e.into_inner());
    let result = f(&mut host);
    let worked = result.is_ok();
    host.output = result.unwrap_or_else(|e| e.to_string());
    worked
}

/// Room for `len` bytes, which the next call will read.
#[unsafe(no_mangle)]
pub extern "C" fn input(len: usize) -> *mut u8 {
    let mut host = HOST.lock().unwrap_or_else(|e| e.into_inner());
    host.input = vec![0; len];
    host.input.as_mut_ptr()
}

/// Length of the text that the last call left.
#[unsafe(no_mangle)]
pub extern "C" fn output_len() -> usize {
    HOST.lock().unwrap_or_else(|e| e.into_inner()).output.len()
}

/// The text that the last call left, in UTF-8.
#[unsafe(no_mangle)]
pub extern "C" fn output() -> *const u8 {
    HOST.lock()
        .unwrap_or_else(|e| e.into_inner())
        .output
        .as_ptr()
}

/// Opens the model whose GGUF file the input is.
#[unsafe(no_mangle)]
pub extern "C" fn open() -> bool {
    answer(|host| {
        let gguf = Gguf::from_bytes(std::mem::take(&mut host.input))?;
        let model = Model::from_gguf(gguf)?;
        let text = format!(
            "{} weights, level {}",
            model.n_params(),
            model.arch().name()
        );
        host.model = Some(model);
        Ok(text)
    })
}

/// Continues the text that the input is by the likeliest tokens, at most `n_tokens`.
///
/// # Panics
/// If no model is open.
#[unsafe(no_mangle)]
pub extern "C" fn generate(n_tokens: usize) -> bool {
    answer(|host| {
        let prompt = String::from_utf8_lossy(&host.input);
        let mut session = host.model.as_ref().expect("`open` comes first").session()?;
        let mut sampler = Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })?;
        Ok(session
            .generate(&*prompt, &mut sampler)?
            .max_tokens(n_tokens)
            .text()?)
    })
}

/// Learns the text that the input is, saves what was learnt, and goes on from what was saved; tells
/// the losses of the text read twice.
///
/// # Panics
/// If no model is open.
#[unsafe(no_mangle)]
pub extern "C" fn learn() -> bool {
    answer(|host| {
        let model = host.model.as_ref().expect("`open` comes first");
        let text = String::from_utf8_lossy(&host.input);
        let tokens = model
            .tokenizer()
            .map(|tokenizer| tokenizer.encode(&text, true, false))
            .unwrap_or_default();
        let mut session = model.session()?;
        session.set_learner(Learner::new(model, &LearnerOptions::default())?)?;
        let first = session.observe(&tokens)?;
        let saved = session
            .take_learner()
            .map(|learner| learner.to_bytes())
            .transpose()?
            .unwrap_or_default();
        let n_bytes = saved.len();
        session.clear();
        session.set_learner(Learner::from_bytes(saved, model)?)?;
        let again = session.observe(&tokens)?;
        Ok(format!(
            "{} {} {} {n_bytes}",
            first.base, first.mixture, again.mixture
        ))
    })
}
