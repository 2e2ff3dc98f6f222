//! A struct that owns a model and a conversation, used from a thread of its own through channels.

use ruvllm::{Model, Sampler, SamplerOptions, Session};
use std::sync::mpsc;

/// What one user has: all of it can be moved to any thread.
struct Assistant {
    model: Model,
    session: Session,
    sampler: Sampler,
}

impl Assistant {
    fn new(path: &str) -> Result<Assistant, Box<dyn std::error::Error + Send + Sync>> {
        let model = Model::open(path)?;
        let session = model.session()?;
        Ok(Assistant {
            model,
            session,
            sampler: Sampler::new(SamplerOptions {
                seed: Some(1),
                ..Default::default()
            })?,
        })
    }

    fn answer(&mut self, prompt: &str) -> Result<String, ruvllm::decode::DecodeError> {
        self.session
            .generate(prompt, &mut self.sampler)?
            .max_tokens(16)
            .text()
    }

    /// A second conversation on the same weights and threads.
    fn another(&self) -> Result<Session, ruvllm::SessionError> {
        self.model.session()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "models/ruvllm-rust-6m-q8_0.gguf".into());
    let mut assistant = Assistant::new(&path)?;
    let mut other = assistant.another()?;
    let (questions, asked) = mpsc::channel::<String>();
    let (answers, answered) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        for question in asked {
            if answers.send(assistant.answer(&question)).is_err() {
                break; // nobody listens any more
            }
        }
    });
    for question in ["Ownership is", " Borrowing is"] {
        questions.send(question.into())?;
        println!("{question}{}", answered.recv()??);
    }
    drop(questions);
    worker.join().map_err(|_| "the worker panicked")?;
    other.prefill(&[1, 2, 3])?; // outlives the assistant: it keeps what it needs
    Ok(())
}
