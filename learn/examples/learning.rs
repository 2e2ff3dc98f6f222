//! A session that learns from its user while it runs, within a bound on what it may forget.

use ruvllm::Model;
use ruvllm_learn::{Learner, LearnerOptions, Learning};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "models/ruvllm-rust-6m-q8_0.gguf".into());
    let model = Model::open(path)?;
    let tokenizer = model.tokenizer().ok_or("the file has no tokenizer")?;
    let mut session = model.session()?;
    session.set_learner(Learner::new(&model, &LearnerOptions::default())?)?;
    for line in [
        "The gauge at Ossen Weir reads 1.84.",
        "The gauge at Ossen Weir reads 1.91.",
    ] {
        session.clear();
        let losses = session.observe(&tokenizer.encode(line, true, false))?; // scored, then learnt
        println!(
            "{line} {:.1} nats without what was learnt, {:.1} with it",
            losses.base, losses.mixture
        );
    }
    session
        .learner()
        .ok_or("it learns")?
        .save(std::env::temp_dir().join("ruvllm-example.learned"))?;
    Ok(())
}
