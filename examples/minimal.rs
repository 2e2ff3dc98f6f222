//! Open a model, continue a text: `cargo run --release --example minimal -- MODEL.gguf "Once upon a
//! time"`.

use ruvllm::{Model, Sampler, SamplerOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .unwrap_or_else(|| "models/ruvllm-rust-6m-q8_0.gguf".into());
    let prompt = args.next().unwrap_or_else(|| "Ownership is".into());

    let model = Model::open(path)?;
    let mut session = model.session()?;
    let mut sampler = Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })?;
    print!("{prompt}");
    for piece in session.generate(&prompt, &mut sampler)?.max_tokens(32) {
        print!("{}", piece?.text);
    }
    println!();
    Ok(())
}
