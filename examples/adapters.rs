//! A LoRA adapter beside the frozen weights: one session with it, one without.

use ruvllm::Model;
use ruvllm::lora::Adapter;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = Model::open(
        args.next()
            .unwrap_or_else(|| "models/ruvllm-rust-6m-q8_0.gguf".into()),
    )?;
    let adapter = match args.next() {
        Some(path) => Adapter::open(path, &model)?,
        None => {
            let mut adapter = Adapter::zeros(&model, 2, 1, |site| site.part() == "ffn_down")?;
            adapter
                .terms_mut()
                .for_each(|(_, term)| term.parts_mut().1.fill(0.01));
            adapter
        }
    };
    let (mut plain, mut adapted) = (model.session()?, model.session()?);
    adapted.adapters().attach(Arc::new(adapter), 1.0)?;
    plain.prefill(&[1, 2, 3])?;
    adapted.prefill(&[1, 2, 3])?;
    let apart = plain
        .logits()
        .iter()
        .zip(adapted.logits())
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    println!("the adapter moves logits by up to {apart:.3}");
    Ok(())
}
