//! Feed-forward layers in a plan.

use crate::compute::weight::{Linear, Weight};
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::{Intermediate, NO_BIAS, Name, Part, Planner, bytes, refused, size};
use crate::layers::activation::spec::Activation;
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::moe::spec::{Gating, MoeSpec};
use crate::layers::moe::weights::Moe;
use crate::quant::DType;

impl<'m> Planner<'m, '_> {
    /// Activation of `n` values in [`Intermediate::Gate`] and [`Intermediate::Up`]; returns the
    /// buffer with the result.
    pub(super) fn activate(
        &mut self,
        activation: Activation,
        n: usize,
    ) -> Result<Name<'m>, GpuError> {
        let args = ElementwiseArgs { n: size(n)? };
        let (gate, up) = (Left(Intermediate::Gate), Left(Intermediate::Up));
        match activation {
            Activation::SwiGlu => self.plain(&SILU_MUL, &args, &[gate, up]),
            Activation::GeGlu => self.plain(&GELU_MUL, &args, &[gate, up]),
            Activation::Gelu => self.plain(&GELU, &args, &[up]),
            Activation::SquaredRelu => self.plain(&SQUARED_RELU, &args, &[up]),
            Activation::SwiGluOai => self.plain(&SWIGLU_OAI, &args, &[gate, up]),
            _ => return Err(refused(format!("the activation {activation:?}"))),
        }
        Ok(if activation.is_gated() { gate } else { up })
    }

    pub(super) fn feed_forward(
        &mut self,
        ffn: &'m Ffn,
        x: Name<'m>,
        y: Intermediate,
    ) -> Result<(), GpuError> {
        if let Some(gate) = &ffn.gate {
            self.linear(gate, x, Left(Intermediate::Gate))?;
        }
        self.linear(&ffn.up, x, Left(Intermediate::Up))?;
        let inner = self.activate(ffn.activation, self.rows.n as usize * ffn.up.w.n_out)?;
        self.linear(&ffn.down, inner, Left(y))
    }

    pub(super) fn experts(&mut self, moe: &'m Moe, x: Name<'m>) -> Result<(), GpuError> {
        let Moe {
            spec,
            router,
            latent_norm: _,
            by_token: _,
            router_norm: _,
            latent: _,
            adjugate: _,
            output_scales: _,
            bias,
            stacked,
            shared,
            shared_gate,
        } = moe;
        let Ffn {
            gate,
            up,
            down,
            activation: _,
            sparsity: _,
            sub_norm: _,
        } = stacked;
        self.route(spec, router, bias.as_deref(), x)?;
        let (n_rows, n) = (self.rows.n, self.n_embd()?);
        let (expert_count, used) = (size(spec.n_expert)?, size(spec.n_used)?);
        let (of_gate, of_up, of_out) = (
            Left(Intermediate::Gate),
            Left(Intermediate::Up),
            Left(Intermediate::ExpertOut),
        );
        let runs = self.expert_runs(used, expert_count);
        if let Some(gate) = gate {
            self.expert_product(&runs, gate, (x, used), of_gate)?;
        }
        self.expert_product(&runs, up, (x, used), of_up)?;
        let n_inner = n_rows as usize * spec.n_used * spec.n_ff;
        let inner = self.activate(spec.activation, n_inner)?;
        self.expert_product(&runs, down, (inner, 1), of_out)?;
        let (weights, out) = (
            Left(Intermediate::ExpertWeights),
            Left(Intermediate::FfnOut),
        );
        self.plain(
            &COMBINE_EXPERTS,
            &CombineExpertsArgs {
                n,
                n_rows,
                n_used: used,
            },
            &[of_out, weights, out],
        );
        match shared {
            Some(shared) => self.shared_expert(shared, shared_gate.as_ref(), x, out),
            None => Ok(()),
        }
    }

    /// Chooses the experts of each row, and computes their weights.
    fn route(
        &mut self,
        spec: &MoeSpec,
        router: &'m Linear,
        bias: Option<&'m [f32]>,
        x: Name<'m>,
    ) -> Result<(), GpuError> {
        let &MoeSpec {
            n_expert,
            n_used,
            gating,
            groups,
            normalise,
            scale,
            ..
        } = spec;
        if groups.is_some_and(|groups| groups.n_used < groups.n_group)
            || n_expert > MAX_EXPERTS as usize
        {
            return Err(refused(format!(
                "a mixture of {n_expert} experts in groups"
            )));
        }
        self.linear(router, x, Left(Intermediate::Router))?;
        let args = RouteArgs {
            n_rows: self.rows.n,
            n_expert: size(n_expert)?,
            n_used: size(n_used)?,
            gating: match gating {
                Gating::Softmax => 0,
                Gating::SoftmaxAfterTopK => 1,
                Gating::Sigmoid => 2,
                Gating::SqrtSoftplus => {
                    return Err(refused("a router of roots of softplus".to_string()));
                }
                Gating::SparseMixer => return Err(refused("the SparseMixer router".to_string())),
            },
            normalise: normalise.into(),
            scale,
        };
        self.plain(
            &ROUTE,
            &args,
            &[
                Left(Intermediate::Router),
                Name::Constant(bias.unwrap_or(&NO_BIAS)),
                Left(Intermediate::Chosen),
                Left(Intermediate::ExpertWeights),
            ],
        );
        Ok(())
    }

    /// Adds the output of the expert that every row uses, by its gate if it has one.
    fn shared_expert(
        &mut self,
        shared: &'m Ffn,
        gate: Option<&'m Weight>,
        x: Name<'m>,
        out: Name<'m>,
    ) -> Result<(), GpuError> {
        self.feed_forward(shared, x, Intermediate::SharedOut)?;
        let (n_rows, n) = (self.rows.n, self.n_embd()?);
        let shared = Left(Intermediate::SharedOut);
        match gate {
            Some(gate) => {
                self.product(gate, x, Left(Intermediate::SharedGate))?;
                self.plain(
                    &ADD_GATED,
                    &AddGatedArgs { n, n_rows },
                    &[out, shared, Left(Intermediate::SharedGate)],
                );
            }
            None => {
                let args = AddScaledArgs {
                    n: size(n_rows as usize * self.h.n_embd)?,
                    scale: 1.0,
                };
                self.plain(&ADD_SCALED, &args, &[out, shared]);
            }
        }
        Ok(())
    }

    /// Runs of rows for products of experts; runs of prompts have lists of the rows of each expert.
    fn expert_runs(&mut self, n_used: u32, n_expert: u32) -> Vec<ExpertRun> {
        let (mut counts, mut lists) = (0, 0);
        let mut runs = Vec::new();
        for run in self.rows.runs() {
            let n_chosen = run.n * n_used;
            runs.push(ExpertRun {
                run,
                n_used,
                n_expert,
                counts,
                lists,
            });
            if !run.generated {
                let buffers = [
                    (Left(Intermediate::Chosen), bytes(run.first, n_used)),
                    (Left(Intermediate::ExpertCounts), counts),
                    (Left(Intermediate::ExpertLists), lists),
                ];
                self.push(
                    (&EXPERT_ROWS, DType::F32, 0),
                    &ExpertRowsArgs { n_chosen, n_expert },
                    &buffers,
                    None,
                );
                counts += bytes(n_expert, 1);
                lists += bytes(n_expert, n_chosen);
            }
        }
        runs
    }

    /// `y = x·Wᵀ + b` for each choice of an expert; a row of `x` has `choices_per_row` choices.
    fn expert_product(
        &mut self,
        runs: &[ExpertRun],
        linear: &'m Linear,
        (x, choices_per_row): (Name<'m>, u32),
        y: Name<'m>,
    ) -> Result<(), GpuError> {
        let w = &linear.w;
        let (matrix, format) = self.weight(w)?;
        for &ExpertRun {
            run,
            n_used,
            n_expert,
            counts,
            lists,
        } in runs
        {
            let (n_in, n_out, row_bytes) = (
                size(w.n_in)?,
                size(w.n_out)? / n_expert,
                size(w.row_bytes())?,
            );
            let (first, n_chosen) = (run.first * n_used, run.n * n_used);
            let (x, y) = (
                (x, bytes(first / choices_per_row, n_in)),
                (y, bytes(first, n_out)),
            );
            if run.generated {
                let args = MatvecExpertsArgs {
                    n_in,
                    n_out,
                    n_chosen,
                    n_expert,
                    choices_per_row,
                    row_bytes,
                };
                let buffers = [matrix, x, (Left(Intermediate::Chosen), bytes(first, 1)), y];
                self.push((&MATVEC_EXPERTS, format, 0), &args, &buffers, None);
            } else {
                let args = MatmulExpertsArgs {
                    n_in,
                    n_out,
                    n_chosen,
                    n_expert,
                    choices_per_row,
                    row_bytes,
                };
                let lists = [
                    (Left(Intermediate::ExpertCounts), counts),
                    (Left(Intermediate::ExpertLists), lists),
                ];
                self.push(
                    (&MATMUL_EXPERTS, format, 0),
                    &args,
                    &[matrix, x, lists[0], lists[1], y],
                    None,
                );
            }
            if let Some(b) = &linear.b {
                let args = AddExpertBiasArgs {
                    n: n_out,
                    n_chosen,
                    n_expert,
                };
                let buffers = [
                    y,
                    (Name::Constant(b), 0),
                    (Left(Intermediate::Chosen), bytes(first, 1)),
                ];
                self.push((&ADD_EXPERT_BIAS, DType::F32, 0), &args, &buffers, None);
            }
        }
        match runs.first() {
            Some(of) => self.expert_terms(w, (x, choices_per_row), (of.n_used, of.n_expert), y),
            None => Ok(()),
        }
    }
}

/// Rows of one kind, for products of experts.
#[derive(Clone, Copy, Debug)]
struct ExpertRun {
    run: Part,
    n_used: u32,
    n_expert: u32,
    /// Byte offsets of the lists.
    counts: u64,
    lists: u64,
}
