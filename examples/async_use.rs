//! Use from async code, whatever the runtime: generation goes on a blocking thread, pieces come
//! through a channel, and dropping the receiver cancels. With tokio replace `std::thread::spawn` by
//! `tokio::task::spawn_blocking` and the channel by `tokio::sync::mpsc` with `blocking_send`.

use ruvllm::decode::DecodeError;
use ruvllm::{CancelToken, Generation, Model, Sampler, SamplerOptions};
use std::sync::mpsc::{Receiver, sync_channel};

/// Pieces of text as they come. Dropped, it ends the generation within one pass.
struct Answer {
    pieces: Receiver<Result<String, DecodeError>>,
    cancel: CancelToken,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

fn answer(mut generation: Generation) -> Answer {
    let cancel = generation.session().cancel_token();
    // Bounded: who reads slowly slows this generation and nothing else.
    let (sender, pieces) = sync_channel(16);
    std::thread::spawn(move || {
        for piece in &mut generation {
            if sender.send(piece.map(|piece| piece.text)).is_err() {
                break;
            }
        }
    });
    Answer { pieces, cancel }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "models/ruvllm-rust-6m-q8_0.gguf".into());
    let model = Model::open(path)?;
    let sampler = Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })?;
    let answer = answer(
        model
            .session()?
            .into_generation("Ownership is", sampler)
            .max_tokens(200),
    );
    for piece in answer.pieces.iter().take(12) {
        print!("{}", piece?);
    }
    println!(" … (enough)");
    Ok(())
}
