//! Feed-forward layers in a plan.

use crate::compute::weight::{Linear, Weight};
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::choices::{Choices, ExpertRuns};
use crate::gpu::plan::heads::HeadPart;
use crate::gpu::plan::{Intermediate, NO_BIAS, Name, ONES, Planner, refused, size};
use crate::layers::activation::spec::Activation;
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::layer::weights::{Beside, Both};
use crate::layers::moe::spec::{Gating, MoeSpec};
use crate::layers::moe::weights::Moe;

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
            Activation::Relu => {
                self.unary(UnaryFunction::Clamp, [0.0, f32::MAX, 0.0, 0.0], up, n)?
            }
            Activation::GeluErf => self.unary(UnaryFunction::GeluErf, [0.0; 4], up, n)?,
            Activation::Xielu {
                alpha_p,
                alpha_n,
                beta,
                eps,
            } => self.unary(UnaryFunction::Xielu, [alpha_p, alpha_n, beta, eps], up, n)?,
            Activation::ReGlu => self.gated(GatedFunction::Relu, [0.0; 2], n)?,
            Activation::GeGluErf => self.gated(GatedFunction::GeluErf, [0.0; 2], n)?,
            Activation::SwiGluClamped { limit } => {
                self.gated(GatedFunction::SiluClamped, [limit, 0.0], n)?
            }
            Activation::SwiGluClampedAfter { limit } => {
                self.gated(GatedFunction::SiluClampedAfter, [limit, 0.0], n)?
            }
            Activation::Situ { beta, linear } => {
                self.gated(GatedFunction::Situ, [beta, linear.unwrap_or(0.0)], n)?
            }
        }
        Ok(if activation.is_gated() { gate } else { up })
    }

    /// `x = f(x)` for `n` values.
    pub(super) fn unary(
        &mut self,
        function: UnaryFunction,
        [a, b, c, d]: [f32; 4],
        x: Name<'m>,
        n: usize,
    ) -> Result<(), GpuError> {
        let args = FunctionArgs {
            n: size(n)?,
            function: function as u32,
            a,
            b,
            c,
            d,
        };
        self.plain(&UNARY, &args, &[x]);
        Ok(())
    }

    /// `gate = f(gate, up)` for `n` values.
    fn gated(
        &mut self,
        function: GatedFunction,
        [a, b]: [f32; 2],
        n: usize,
    ) -> Result<(), GpuError> {
        let args = FunctionArgs {
            n: size(n)?,
            function: function as u32,
            a,
            b,
            ..FunctionArgs::default()
        };
        let buffers = [Left(Intermediate::Gate), Left(Intermediate::Up)];
        self.plain(&GATED, &args, &buffers);
        Ok(())
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
        let mut inner = self.activate(ffn.activation, self.rows.n as usize * ffn.up.w.n_out)?;
        if let Some((norm, eps)) = &ffn.sub_norm {
            let normed = Left(Intermediate::InnerNormed);
            self.row_norm(norm, *eps, inner, normed)?;
            inner = normed;
        }
        self.linear(&ffn.down, inner, Left(y))
    }

    pub(super) fn experts(&mut self, moe: &'m Moe, x: Name<'m>) -> Result<(), GpuError> {
        let Moe {
            spec,
            router,
            latent,
            latent_norm,
            by_token: _, // this and what is not named is in `supports`
            router_norm,
            adjugate: _,
            output_scales: _,
            bias: _,
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
        match router_norm {
            Some(norm) => {
                let input = Left(Intermediate::RouterIn);
                self.norm(norm, self.h.norm_eps, self.x(), input)?;
                self.linear(router, input, Left(Intermediate::Router))?;
            }
            None if spec.routes_early => {}
            None => self.linear(router, x, Left(Intermediate::Router))?,
        }
        self.route(moe)?;
        let (mut read, mut sum, mut n) = (x, Intermediate::FfnOut, self.h.n_embd);
        if let Some((down, _)) = latent {
            (read, sum, n) = (
                Left(Intermediate::LatentIn),
                Intermediate::LatentOut,
                down.w.n_out,
            );
            self.linear(down, x, read)?;
        }
        let n_rows = self.rows.n;
        let (expert_count, used) = (size(spec.n_expert)?, size(spec.n_used)?);
        let (of_gate, of_up, of_out) = (
            Left(Intermediate::Gate),
            Left(Intermediate::Up),
            Left(Intermediate::ExpertOut),
        );
        let runs = self.choose(Choices {
            n_used: used,
            n_expert: expert_count,
            most_each: used, // NaN is no reason for any of them
            chosen: Left(Intermediate::Chosen),
            counts: Left(Intermediate::ExpertCounts),
            lists: Left(Intermediate::ExpertLists),
        });
        self.list_rows(&runs);
        let input = match spec.weighs_inputs {
            true => (self.weigh_inputs(spec.n_used, read, n)?, 1),
            false => (read, used),
        };
        if let Some(gate) = gate {
            self.expert_product(&runs, gate, input, of_gate)?;
        }
        if spec.fused {
            let (both, sizes) = (Left(Intermediate::GateUp), (spec.n_used, spec.n_ff));
            self.expert_product(&runs, up, input, both)?;
            for (to, first) in [(of_gate, 0), (of_up, spec.n_ff)] {
                let from = HeadPart::of(both, (spec.n_used, 2 * spec.n_ff), first);
                self.copy_heads(sizes, from, HeadPart::of(to, sizes, 0))?;
            }
        } else {
            self.expert_product(&runs, up, input, of_up)?;
        }
        let n_inner = n_rows as usize * spec.n_used * spec.n_ff;
        let inner = self.activate(spec.activation, n_inner)?;
        self.expert_product(&runs, down, (inner, 1), of_out)?;
        let args = CombineExpertsArgs {
            n: size(n)?,
            n_rows,
            n_used: used,
        };
        let weights = Left(Intermediate::ExpertWeights);
        self.plain(&COMBINE_EXPERTS, &args, &[of_out, weights, Left(sum)]);
        let out = Left(Intermediate::FfnOut);
        if let Some((_, up)) = latent {
            let mut of_all = Left(sum);
            if let Some(norm) = latent_norm {
                let normed = Left(Intermediate::LatentNormed);
                self.row_norm(norm, self.h.norm_eps, of_all, normed)?;
                of_all = normed;
            }
            self.linear(up, of_all, out)?;
        }
        match shared {
            Some(shared) => self.shared_expert(shared, shared_gate.as_ref(), x, out),
            None => Ok(()),
        }
    }

    /// A dense layer on `x` beside a mixture on the residual stream, each with its norms; returns the
    /// sum of their outputs.
    pub(super) fn both(&mut self, w: &'m Both, x: Name<'m>) -> Result<Intermediate, GpuError> {
        use Intermediate::{BesideIn, DenseNormed, DenseOut, FfnOut, MoeNormed};
        let eps = self.h.norm_eps;
        self.feed_forward(&w.dense, x, DenseOut)?;
        self.norm(&w.post_dense_norm, eps, Left(DenseOut), Left(DenseNormed))?;
        let input = Left(BesideIn(self.rows.set));
        self.norm(&w.moe_norm, eps, self.x(), input)?;
        self.experts(&w.moe, input)?;
        self.norm(&w.post_moe_norm, eps, Left(FfnOut), Left(MoeNormed))?;
        let args = AddScaledArgs {
            n: size(self.rows.n as usize * self.h.n_embd)?,
            scale: 1.0,
        };
        self.plain(&ADD_SCALED, &args, &[Left(MoeNormed), Left(DenseNormed)]);
        Ok(MoeNormed)
    }

    /// The input, of `n` values, of each of a row's experts, multiplied by that expert's weight, which
    /// is 1 from then on.
    fn weigh_inputs(&mut self, n_used: usize, x: Name<'m>, n: usize) -> Result<Name<'m>, GpuError> {
        let (inputs, weights) = (
            Left(Intermediate::ExpertIn),
            Left(Intermediate::ExpertWeights),
        );
        let of_row = HeadPart {
            head: 0,
            ..HeadPart::of(x, (1, n), 0)
        };
        let of_experts = HeadPart::of(inputs, (n_used, n), 0);
        self.copy_heads((n_used, n), of_row, of_experts)?;
        let n_head = size(n_used)?;
        let args = GateHeadsArgs {
            n: size(n)?,
            n_head,
            n_rows: self.rows.n,
            gate_value: 0,
            gate_head: 1,
            gate_row: n_head,
            function: GateFunction::Identity as u32,
        };
        self.plain(&GATE_HEADS, &args, &[inputs, weights]);
        let one = HeadPart::of(Name::Constant(&ONES[..1]), (0, 0), 0);
        self.copy_heads((n_used, 1), one, HeadPart::of(weights, (n_used, 1), 0))?;
        Ok(inputs)
    }

    /// Adds what a dense layer makes of `x` to what a mixture does of `moe_input`.
    pub(super) fn beside(
        &mut self,
        w: &'m Beside,
        x: Name<'m>,
        moe_input: Name<'m>,
    ) -> Result<(), GpuError> {
        self.feed_forward(&w.dense, x, Intermediate::DenseOut)?;
        self.experts(&w.moe, moe_input)?;
        let n = self.rows.n as usize * self.h.n_embd;
        let args = AddScaledArgs {
            n: size(n)?,
            scale: 1.0,
        };
        let out = Left(Intermediate::FfnOut);
        self.plain(&ADD_SCALED, &args, &[out, Left(Intermediate::DenseOut)]);
        match w.scale {
            1.0 => Ok(()),
            scale => self.unary(UnaryFunction::Scale, [scale, 0.0, 0.0, 0.0], out, n),
        }
    }

    /// Chooses the experts of each row by the router's outputs, and computes their weights.
    fn route(&mut self, moe: &'m Moe) -> Result<(), GpuError> {
        let &MoeSpec {
            n_expert,
            n_used,
            gating,
            groups,
            normalise,
            scale,
            ..
        } = &moe.spec;
        // All groups are as good as none; logits are ranked otherwise by their exponentials.
        let [n_group, n_group_used] = match groups {
            Some(groups) if groups.n_used < groups.n_group => [groups.n_group, groups.n_used],
            _ => [1, 1],
        };
        if n_expert > MAX_EXPERTS as usize
            || n_group > MAX_GROUPS as usize
            || (n_group > 1 && gating == Gating::SoftmaxAfterTopK)
        {
            return Err(refused(format!(
                "a mixture of {n_expert} experts in {n_group} groups"
            )));
        }
        let args = RouteArgs {
            n_rows: self.rows.n,
            n_expert: size(n_expert)?,
            n_used: size(n_used)?,
            n_group: size(n_group)?,
            n_group_used: size(n_group_used)?,
            gating: match gating {
                Gating::Softmax => 0,
                Gating::SoftmaxAfterTopK => 1,
                Gating::Sigmoid => 2,
                Gating::SqrtSoftplus => 3,
                Gating::SparseMixer => return Err(refused("the SparseMixer router".to_string())),
            },
            normalise: normalise.into(),
            scale,
        };
        let scales = moe.output_scales.as_deref();
        self.plain(
            &ROUTE,
            &args,
            &[
                Left(Intermediate::Router),
                Name::Constant(moe.bias.as_deref().unwrap_or(&NO_BIAS)),
                Name::Constant(scales.unwrap_or(&ONES[..MAX_EXPERTS as usize])),
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

    /// `y = x·Wᵀ + b` for each choice of an expert; a row of `x` has `choices_per_row` choices.
    fn expert_product(
        &mut self,
        of: &ExpertRuns<'m>,
        linear: &'m Linear,
        (x, choices_per_row): (Name<'m>, u32),
        y: Name<'m>,
    ) -> Result<(), GpuError> {
        self.stacked_product(of, &linear.w, (x, choices_per_row), y)?;
        let Choices {
            n_used, n_expert, ..
        } = of.choices;
        if let Some(b) = &linear.b {
            let args = AddExpertBiasArgs {
                n: size(linear.w.n_out)? / n_expert,
                n_chosen: self.rows.n * n_used,
                n_expert,
            };
            let buffers = [y, Name::Constant(b), of.choices.chosen];
            self.plain(&ADD_EXPERT_BIAS, &args, &buffers);
        }
        self.expert_terms(&linear.w, (x, choices_per_row), of.choices, y)
    }
}
