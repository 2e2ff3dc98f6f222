//! Products with stacked matrices, of which each row chooses some: experts, or one for each head.

use crate::compute::weight::Weight;
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::{Name, Part, Planner, bytes, size};
use crate::quant::DType;

/// Which of several stacked matrices each row is multiplied by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choices<'m> {
    /// Matrices of a row, and of the stack.
    pub(super) n_used: u32,
    pub(super) n_expert: u32,
    /// How often a row may be multiplied by the same one.
    pub(super) most_each: u32,
    /// The numbers of the matrices, `(n_rows, n_used)`.
    pub(super) chosen: Name<'m>,
    /// Rows of each matrix, for prompts: their number, and their indices.
    pub(super) counts: Name<'m>,
    pub(super) lists: Name<'m>,
}

/// Products with stacked matrices, by kind of row.
#[derive(Debug)]
pub(super) struct ExpertRuns<'m> {
    pub(super) choices: Choices<'m>,
    runs: Vec<ExpertRun>,
}

/// Rows of one kind.
#[derive(Clone, Copy, Debug)]
struct ExpertRun {
    rows: Part,
    /// Byte offsets of the lists.
    counts: u64,
    lists: u64,
}

impl<'m> Planner<'m, '_> {
    /// Products of each row of the current set with `choices.n_used` of `choices.n_expert` stacked
    /// matrices.
    pub(super) fn choose(&self, choices: Choices<'m>) -> ExpertRuns<'m> {
        let (mut counts, mut lists) = (0, 0);
        let mut runs = Vec::new();
        for rows in self.rows.runs() {
            runs.push(ExpertRun {
                rows,
                counts,
                lists,
            });
            if !rows.generated {
                counts += bytes(choices.n_expert, 1);
                lists += bytes(choices.n_expert, rows.n * choices.n_used);
            }
        }
        ExpertRuns { choices, runs }
    }

    /// Lists the rows of each expert, which products of prompts read.
    pub(super) fn list_rows(&mut self, ExpertRuns { choices, runs }: &ExpertRuns<'m>) {
        for run in runs.iter().filter(|run| !run.rows.generated) {
            let args = ExpertRowsArgs {
                n_chosen: run.rows.n * choices.n_used,
                n_expert: choices.n_expert,
            };
            let buffers = [
                (choices.chosen, bytes(run.rows.first, choices.n_used)),
                (choices.counts, run.counts),
                (choices.lists, run.lists),
            ];
            self.push((&EXPERT_ROWS, DType::F32, 0), &args, &buffers, None);
        }
    }

    /// `y = x·Wᵀ` for each choice of an expert, without the adapters' terms.
    pub(super) fn stacked_product(
        &mut self,
        of: &ExpertRuns<'m>,
        w: &Weight,
        (x, choices_per_row): (Name<'m>, u32),
        y: Name<'m>,
    ) -> Result<(), GpuError> {
        let (matrix, format) = self.weight(w)?;
        let Choices {
            n_used,
            n_expert,
            most_each,
            chosen,
            counts,
            lists,
        } = of.choices;
        let (n_in, n_out, row_bytes) = (
            size(w.n_in)?,
            size(w.n_out)? / n_expert,
            size(w.row_bytes())?,
        );
        for run in &of.runs {
            let (first, n_chosen) = (run.rows.first * n_used, run.rows.n * n_used);
            let (x, y) = (
                (x, bytes(first / choices_per_row, n_in)),
                (y, bytes(first, n_out)),
            );
            if run.rows.generated {
                let args = MatvecExpertsArgs {
                    n_in,
                    n_out,
                    n_chosen,
                    n_expert,
                    choices_per_row,
                    row_bytes,
                };
                let buffers = [matrix, x, (chosen, bytes(first, 1)), y];
                self.push((&MATVEC_EXPERTS, format, 0), &args, &buffers, None);
            } else {
                let args = MatmulExpertsArgs {
                    n_in,
                    n_out,
                    n_rows: run.rows.n * most_each,
                    n_chosen,
                    n_expert,
                    choices_per_row,
                    row_bytes,
                };
                let buffers = [matrix, x, (counts, run.counts), (lists, run.lists), y];
                self.push((&MATMUL_EXPERTS, format, 0), &args, &buffers, None);
            }
        }
        Ok(())
    }
}
