//! Adapters' terms in a plan.

use crate::compute::weight::Weight;
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::choices::Choices;
use crate::gpu::plan::{Input, Intermediate, Name, Planner, bytes, size};
use crate::lora::Attached;
use crate::quant::DType;
use std::sync::Arc;

impl<'m> Planner<'m, '_> {
    /// Index of an adapter in the plan, and that of the first value of its term at `site`.
    pub(super) fn adapter(&mut self, attached: &Attached, site: usize) -> (usize, u64) {
        let adapter = &attached.adapter;
        let known = self
            .plan
            .adapters
            .iter()
            .position(|other| Arc::ptr_eq(other, adapter));
        let index = known.unwrap_or_else(|| {
            let mut end = 0;
            let mut firsts = vec![0; adapter.sites().len()];
            for (site, term) in adapter.terms() {
                firsts[site] = end;
                end += term.a().len() + term.b().len();
            }
            self.first_values.push(firsts);
            self.plan.adapters.push(Arc::clone(adapter));
            self.plan.adapters.len() - 1
        });
        (index, self.first_values[index][site] as u64)
    }

    /// Adds the adapters' terms to looked-up rows of the embedding table.
    pub(super) fn embed_terms(&mut self, table: &Weight, x: Name<'m>) -> Result<(), GpuError> {
        for part in self.rows.parts.clone() {
            for attached in self.batch.slots[part.slot].adapters {
                let Some((term, scale)) = attached.term(table.site) else {
                    continue;
                };
                let (adapter, first) = self.adapter(attached, table.site);
                let n_embd = self.n_embd()?;
                let args = LoraArgs {
                    n_in: size(self.h.n_vocab)?,
                    n_out: n_embd,
                    rank: size(term.rank())?,
                    n_rows: part.n,
                    b_stride: n_embd,
                    scale: scale * self.h.embd_scale,
                };
                let buffers = [
                    (Name::Adapter(adapter), 4 * first),
                    (Name::Adapter(adapter), 4 * (first + term.a().len() as u64)),
                    (Name::Input(Input::Tokens), bytes(part.first, 1)),
                    (x, bytes(part.first, n_embd)),
                ];
                self.push((&LORA_EMBED, DType::F32, 0), &args, &buffers, None);
            }
        }
        Ok(())
    }

    /// Adds the adapters' terms to a product with `w`.
    pub(super) fn terms(&mut self, w: &Weight, x: Name<'m>, y: Name<'m>) -> Result<(), GpuError> {
        let (n_in, n_out) = (size(w.n_in)?, size(w.n_out)?);
        for part in self.rows.parts.clone() {
            for attached in self.batch.slots[part.slot].adapters {
                let Some((term, scale)) = attached.term(w.site) else {
                    continue;
                };
                let (adapter, first) = self.adapter(attached, w.site);
                let args = LoraArgs {
                    n_in,
                    n_out,
                    rank: size(term.rank())?,
                    n_rows: part.n,
                    b_stride: size(term.b().len() / term.rank())?,
                    scale,
                };
                let low = (Left(Intermediate::Low), bytes(part.first, args.rank));
                let a = (Name::Adapter(adapter), 4 * first);
                let b = (
                    Name::Adapter(adapter),
                    4 * (first + (term.a().len() + w.first_row) as u64),
                );
                self.push(
                    (&LORA_A, DType::F32, 0),
                    &args,
                    &[a, (x, bytes(part.first, n_in)), low],
                    None,
                );
                self.push(
                    (&LORA_B, DType::F32, 0),
                    &args,
                    &[b, low, (y, bytes(part.first, n_out))],
                    None,
                );
            }
        }
        Ok(())
    }

    /// Adds the adapters' terms to products of experts with a stack `w` of matrices.
    pub(super) fn expert_terms(
        &mut self,
        w: &Weight,
        (x, choices_per_row): (Name<'m>, u32),
        choices: Choices<'m>,
        y: Name<'m>,
    ) -> Result<(), GpuError> {
        let Choices {
            n_used, n_expert, ..
        } = choices;
        let (n_in, n_out) = (size(w.n_in)?, size(w.n_out)? / n_expert);
        for part in self.rows.parts.clone() {
            for attached in self.batch.slots[part.slot].adapters {
                let first_term = self.plan.terms.len() as u64;
                let mut index = None;
                for site in w.site..w.site + n_expert as usize {
                    let entry = match attached.term(site) {
                        Some((term, scale)) => {
                            let (adapter, first) = self.adapter(attached, site);
                            index = Some(adapter);
                            let first = size(first as usize)?;
                            [
                                first,
                                first + size(term.a().len())?,
                                size(term.rank())?,
                                scale.to_bits(),
                            ]
                        }
                        None => [0; 4],
                    };
                    self.plan.terms.push(entry);
                }
                let Some(index) = index else {
                    self.plan.terms.truncate(first_term as usize);
                    continue;
                };
                let first = part.first * n_used;
                let n_values = size(attached.adapter.n_params())?;
                let args = LoraExpertsArgs {
                    n_in,
                    n_out,
                    n_chosen: part.n * n_used,
                    n_expert,
                    choices_per_row,
                    n_values,
                };
                let buffers = [
                    (Name::Adapter(index), 0),
                    (x, bytes(first / choices_per_row, n_in)),
                    (choices.chosen, bytes(first, 1)),
                    (Name::Input(Input::AdmissionConfig), 16 * first_term),
                    (y, bytes(first, n_out)),
                ];
                self.push((&LORA_EXPERTS, DType::F32, 0), &args, &buffers, None);
            }
        }
        Ok(())
    }
}
