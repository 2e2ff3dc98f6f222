//! Embeddings for each layer in a plan.

use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::heads::HeadPart;
use crate::gpu::plan::{Input, Intermediate, Name, Planner, Set, size};
use crate::layers::layer::spec::LayerSpec;
use crate::layers::per_layer_embedding::{PerLayer, PerLayerInputs};
use std::f32::consts::FRAC_1_SQRT_2;

impl<'m> Planner<'m, '_> {
    /// Vectors of all layers for each token, `(norm(proj·x) + table)/√2`. The host looks up the rows of
    /// the table, which is larger than all other weights.
    pub(super) fn per_layer_inputs(&mut self, w: &'m PerLayerInputs) -> Result<(), GpuError> {
        let vectors = Left(Intermediate::PerLayer(Set::All));
        self.product(&w.proj, self.x(), vectors)?;
        let n = self.rows.n as usize * w.proj.n_out;
        let scale = 1.0 / (self.h.n_embd as f32).sqrt();
        self.unary(UnaryFunction::Scale, [scale, 0.0, 0.0, 0.0], vectors, n)?;
        let args = NormArgs {
            n: size(w.norm.len())?,
            n_rows: size(n / w.norm.len())?,
            eps: self.h.norm_eps,
        };
        self.plain(&RMS_NORM_HEADS, &args, &[vectors, Name::Constant(&w.norm)]);
        let args = AddScaledArgs {
            n: size(n)?,
            scale: 1.0,
        };
        let of_table = Name::Input(Input::LayerEmbeddings);
        self.plain(&ADD_SCALED, &args, &[vectors, of_table]);
        self.unary(
            UnaryFunction::Scale,
            [FRAC_1_SQRT_2, 0.0, 0.0, 0.0],
            vectors,
            n,
        )
    }

    /// What layer `i` makes of its vectors, as pending: `norm(proj·(gelu(gate·x)·vector))`.
    pub(super) fn per_layer_branch(
        &mut self,
        i: usize,
        spec: &LayerSpec,
        w: &'m PerLayer,
    ) -> Result<(), GpuError> {
        use Intermediate::{FfnOut, Gate, Up};
        let x = self.enter(None)?;
        self.linear(&w.gate, x, Left(Gate))?;
        let n = w.gate.w.n_out;
        let vectors = HeadPart {
            row: self.h.n_layer * n,
            ..HeadPart::of(Left(Intermediate::PerLayer(self.rows.set)), (1, n), i * n)
        };
        self.copy_heads((1, n), vectors, HeadPart::of(Left(Up), (1, n), 0))?;
        let args = ElementwiseArgs {
            n: size(self.rows.n as usize * n)?,
        };
        self.plain(&GELU_MUL, &args, &[Left(Gate), Left(Up)]);
        self.linear(&w.proj, Left(Gate), Left(FfnOut))?;
        self.leave(FfnOut, Some(&w.norm), spec)
    }
}
