//! Training a low-rank adapter on examples, by exact gradients through the frozen, quantised model.
//!
//! ```
//! use ruvllm::Model;
//! use ruvllm_learn::train::{Example, TrainOptions, Trainer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # std::env::set_current_dir("..")?;
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let tokenizer = model.tokenizer().ok_or("no tokenizer")?;
//! let tokens = |text: &str, begins| tokenizer.encode(text, begins, false);
//! let examples = ["Ossen Weir", "Lower Mill", "Tarn Lock", "Hay Bridge"].map(|name| {
//!     Example::completion(&tokens(&format!("gauge: {name}\n"), true), &tokens("level: rising\n", false))
//! });
//! let options = TrainOptions { epochs: 4.0, batch: 2, held_out: 0.25, ..Default::default() };
//! let mut trainer = Trainer::new(&model.engine()?, &examples, &[], &options)?;
//! while let Some(step) = trainer.step()? {
//!     println!("step {}: {:.3} nats per token", step.step, step.loss);
//! }
//! let report = trainer.report();
//! assert!(report.best().held_out < report.evaluations[0].held_out);
//! trainer.adapter().save(std::env::temp_dir().join("ruvllm-doc-adapter.gguf"))?;
//! # Ok(()) }
//! ```

mod checkpoint;
mod ewc;
mod example;
mod flat;
mod options;
mod preference;
mod replay;
mod trainer;

pub use example::Example;
pub use options::{Loss, Schedule, TargetSet, TrainOptions};
pub use trainer::{Evaluation, Plan, Step, TrainReport, Trainer};
