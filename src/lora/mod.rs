//! Low-rank adapters (LoRA, arXiv 2106.09685): small matrices that change a frozen model.
//!
//! An adapter adds `s·B·A` to matrices of a model, with `A: (rank, n_in)`, `B: (n_out, rank)` and a
//! small rank. The weights stay as they are, quantised and shared: `y = W·x + s·B·(A·x)`. An
//! [`Adapter`] belongs to the [sites](crate::Model::sites) of a model; sessions attach any number of them.
//!
//! This module has data structures and arithmetic on slices. Everything that needs a forward pass
//! is in [`engine`](crate::engine).
//!
//! ```
//! use ruvllm::{Model, lora::Adapter};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let adapter = Arc::new(Adapter::zeros(&model, 2, 1, |site| site.part() == "ffn_down")?);
//! let (mut plain, mut adapted) = (model.session()?, model.session()?);
//! let id = adapted.adapters().attach(Arc::clone(&adapter), 1.0)?;
//! plain.prefill(&[1, 2, 3])?;
//! adapted.prefill(&[1, 2, 3])?;
//! assert_eq!(plain.logits(), adapted.logits()); // B is zero so far
//! adapted.adapters().detach(id)?;
//! # Ok(()) }
//! ```

mod adapter;
mod error;
mod file;
mod gradients;
mod merge;
mod merge_adapters;
mod optimiser;
mod registry;
mod site;
mod svd;

pub use adapter::{Adapter, Term};
pub(crate) use adapter::{Attached, Factor};
pub use error::AdapterError;
pub use gradients::Gradients;
pub(crate) use merge::{kept, merge};
pub use merge_adapters::{MergeMethod, MergeOptions, merge_adapters};
pub use optimiser::{Adam, Optimiser, Sgd, change_norm};
pub use registry::AdapterRegistry;
pub use site::TargetModule;
pub(crate) use site::{Base, TOKEN_EMBD, in_layer};
