//! Attention in a plan.

use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::heads::HeadPart;
use crate::gpu::plan::{
    Input, Intermediate, MAX_HEADS, NO_BIAS, NO_SINKS, Name, ONES, Planner, RowSet, Set, bits,
    bytes, refused, size,
};
use crate::kv::PagePlace;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::rope::spec::RopeOrder;
use crate::quant::DType;

/// Which positions rows see: all or, if `n` is not 0, the last `n`, or those of their chunk of `n`.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Window {
    n: u32,
    chunked: bool,
}

impl Window {
    pub(super) fn of(spec: &AttnSpec) -> Window {
        // A window too large for 32 bits has no effect.
        let n = spec.window.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        Window {
            n,
            chunked: spec.chunked && n > 0,
        }
    }
}

/// Splits of the keys that a generated row at `pos` sees.
pub(super) fn splits(pos: u32, Window { n, chunked }: Window) -> u32 {
    let first = match n {
        0 => 0,
        n if chunked => pos - pos % n,
        n => (pos + 1).saturating_sub(n),
    };
    pos / SPLIT - first / SPLIT + 1
}

impl<'m> Planner<'m, '_> {
    /// Queries of the current rows, before norm and rotation, and gates.
    pub(super) fn queries(
        &mut self,
        spec: &AttnSpec,
        w: &'m Attn,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        let (n_head, d) = (spec.n_head, spec.head_dim);
        if let (Some(latent), Some(weights)) = (&spec.latent, w.latent.as_deref()) {
            self.latent_queries((spec, latent), (w, weights), normed)?;
        } else if spec.gate_in_q {
            self.linear(&w.wq, normed, Left(Intermediate::QGate))?;
            let from = HeadPart::of(Left(Intermediate::QGate), (n_head, 2 * d), 0);
            let to = HeadPart::of(Left(Intermediate::Q), (n_head, d), 0);
            self.copy_heads((n_head, d), from, to)?;
        } else {
            self.linear(&w.wq, normed, Left(Intermediate::Q))?;
        }
        match &w.gate {
            Some(gate) => self.linear(gate, normed, Left(Intermediate::AttnGate)),
            None => Ok(()),
        }
    }

    /// Clamps `n` values of queries, keys or values, if the layer does.
    fn clip(&mut self, spec: &AttnSpec, x: Intermediate, n: usize) -> Result<(), GpuError> {
        match spec.clip {
            Some(clip) => self.unary(UnaryFunction::Clamp, [-clip, clip, 0.0, 0.0], Left(x), n),
            None => Ok(()),
        }
    }

    /// What happens to values between their product and the pages.
    fn values(&mut self, spec: &AttnSpec) -> Result<(), GpuError> {
        let (v, n) = (Intermediate::V, self.rows.n as usize * spec.n_v());
        self.clip(spec, v, n)?;
        if spec.value_scale != 1.0 {
            let scale = [spec.value_scale, 0.0, 0.0, 0.0];
            self.unary(UnaryFunction::Scale, scale, Left(v), n)?;
        }
        if spec.value_norm {
            let args = NormArgs {
                n: size(spec.head_dim_v)?,
                n_rows: size(self.rows.n as usize * spec.n_head_kv)?,
                eps: self.h.norm_eps,
            };
            self.plain(&RMS_NORM_HEADS, &args, &[Left(v), Name::Constant(&ONES)]);
        }
        Ok(())
    }

    /// Multiplies queries by the factors of their heads, and of their positions.
    fn scale_queries(
        &mut self,
        i: usize,
        spec: &AttnSpec,
        w: &'m Attn,
        q: Name<'m>,
    ) -> Result<(), GpuError> {
        let args = GateHeadsArgs {
            n: size(spec.head_dim)?,
            n_head: size(spec.n_head)?,
            n_rows: self.rows.n,
            function: GateFunction::Identity as u32,
            ..GateHeadsArgs::default()
        };
        if let Some(gains) = &w.q_gains {
            let args = GateHeadsArgs {
                gate_head: 1,
                ..args
            };
            self.plain(&GATE_HEADS, &args, &[q, Name::Constant(gains)]);
        }
        if spec.temperature.is_some() {
            let args = GateHeadsArgs {
                gate_row: 1,
                ..args
            };
            let factors = Name::Input(Input::Temperatures(self.rows.set, i));
            self.plain(&GATE_HEADS, &args, &[q, factors]);
        }
        Ok(())
    }

    /// Multiplies the output of attention by its gates, if it has some.
    fn gate(&mut self, spec: &AttnSpec, out: Name<'m>) -> Result<(), GpuError> {
        if !spec.gated {
            return Ok(());
        }
        let (n_head, n) = (size(spec.n_head)?, size(spec.n_mixed() / spec.n_head)?);
        let (gate, [gate_value, gate_head]) = if spec.gate_in_q {
            // Behind the queries of each head.
            let d = size(spec.head_dim)?;
            ((Left(Intermediate::QGate), bytes(1, d)), [1, 2 * d])
        } else {
            let distances = if spec.gate_by_head { [0, 1] } else { [1, n] };
            ((Left(Intermediate::AttnGate), 0), distances)
        };
        let function = if spec.gate_softplus {
            GateFunction::Softplus
        } else {
            GateFunction::Sigmoid
        };
        let args = GateHeadsArgs {
            n,
            n_head,
            n_rows: self.rows.n,
            gate_value,
            gate_head,
            gate_row: gate_head * n_head,
            function: function as u32,
        };
        self.push((&GATE_HEADS, DType::F32, 0), &args, &[(out, 0), gate], None);
        Ok(())
    }

    /// Norm and rotation of heads; returns the buffer with the result.
    pub(super) fn heads(
        &mut self,
        spec: &AttnSpec,
        (from, normed): (Intermediate, Intermediate),
        n_head: usize,
        (norm, bias): (Option<&'m [f32]>, Option<&'m Vec<f32>>),
    ) -> Result<Name<'m>, GpuError> {
        let rows = self.rows.n;
        let mut x = Left(from);
        let (n_head, eps) = (size(n_head)?, self.h.norm_eps);
        let of_heads = NormArgs {
            n: size(spec.head_dim)?,
            n_rows: size(rows as usize * n_head as usize)?,
            eps,
        };
        match (spec.qk_norm, norm) {
            (Some(QkNorm::PerHead), Some(w)) => {
                self.plain(&RMS_NORM_HEADS, &of_heads, &[x, Name::Constant(w)]);
            }
            (Some(QkNorm::Full), Some(w)) => {
                self.row_norm(w, eps, x, Left(normed))?;
                x = Left(normed);
            }
            (Some(QkNorm::LayerFull), Some(w)) => {
                let args = NormArgs {
                    n: size(w.len())?,
                    n_rows: rows,
                    eps,
                };
                let bias = bias.ok_or_else(|| refused("norms without biases".to_string()))?;
                let buffers = [x, Name::Constant(w), Name::Constant(bias), Left(normed)];
                self.plain(&LAYER_NORM, &args, &buffers);
                x = Left(normed);
            }
            (Some(kind @ (QkNorm::LayerByHead | QkNorm::RmsByHead)), Some(w)) => {
                let ones = Name::Constant(&ONES);
                if kind == QkNorm::LayerByHead {
                    let buffers = [x, ones, Name::Constant(&NO_BIAS), Left(normed)];
                    self.plain(&LAYER_NORM, &of_heads, &buffers);
                    x = Left(normed);
                } else {
                    self.plain(&RMS_NORM_HEADS, &of_heads, &[x, ones]);
                }
                let args = GateHeadsArgs {
                    n: of_heads.n,
                    n_head,
                    n_rows: rows,
                    gate_value: 1,
                    gate_head: of_heads.n,
                    gate_row: 0,
                    function: GateFunction::Identity as u32,
                };
                self.plain(&GATE_HEADS, &args, &[x, Name::Constant(w)]);
            }
            (Some(QkNorm::PerHeadRotated | QkNorm::PlainRotated), _) // behind the rotation
            | (None, _)
            | (_, None) => {}
        }
        // The rotated part of latent attention comes last.
        let first = spec.latent.map_or(0, |latent| spec.head_dim - latent.n_rot);
        self.rotate(spec, x, n_head, [spec.head_dim, first])?;
        if let (Some(QkNorm::PerHeadRotated | QkNorm::PlainRotated), Some(w)) = (spec.qk_norm, norm)
        {
            self.plain(&RMS_NORM_HEADS, &of_heads, &[x, Name::Constant(w)]);
        }
        Ok(x)
    }

    /// Rotates heads of `head_dim` values, of each what begins at `first`.
    pub(super) fn rotate(
        &mut self,
        spec: &AttnSpec,
        x: Name<'m>,
        n_head: u32,
        [head_dim, first]: [usize; 2],
    ) -> Result<(), GpuError> {
        let Some(id) = spec.rope else {
            return Ok(());
        };
        let rope = &self.h.ropes[id.index()];
        let args = RopeArgs {
            n_rows: self.rows.n,
            n_head,
            head_dim: size(head_dim)?,
            first: size(first)?,
            n_dims: size(rope.n_dims)?,
        };
        let kernel = match rope.order {
            RopeOrder::Norm => &ROPE_NORM,
            RopeOrder::NeoX => &ROPE_NEOX,
        };
        let angles = Name::Input(Input::Angles(self.rows.set, id.index()));
        self.plain(kernel, &args, &[x, angles]);
        Ok(())
    }

    /// Transforms the heads of keys and queries where the keys of their layer are stored so, those of
    /// values and outputs where its values are.
    pub(super) fn transform(
        &mut self,
        transformed: bool,
        x: Name<'m>,
        n_head: usize,
        head_dim: usize,
    ) -> Result<(), GpuError> {
        if transformed {
            let log_side = head_dim.trailing_zeros();
            let args = HadamardArgs {
                n: size(head_dim)?,
                n_rows: size(self.rows.n as usize * n_head)?,
                log_side,
                factor: 1.0 / ((1u32 << log_side) as f32).sqrt(),
            };
            self.plain(&HADAMARD, &args, &[x]);
        }
        Ok(())
    }

    /// Appends keys and values of all rows to the pages.
    pub(super) fn keys_values(
        &mut self,
        i: usize,
        spec: &AttnSpec,
        w: &'m Attn,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        let [k, v] = match (&spec.latent, w.latent.as_deref()) {
            (Some(latent), Some(weights)) => {
                self.latent_keys_values((spec, latent), (w, weights), normed)?
            }
            _ => {
                self.linear(&w.wk, normed, Left(Intermediate::K))?;
                self.linear(&w.wv, normed, Left(Intermediate::V))?;
                let n_rows = self.rows.n as usize;
                self.clip(spec, Intermediate::K, n_rows * spec.n_k())?;
                self.values(spec)?;
                let k = self.heads(
                    spec,
                    (Intermediate::K, Intermediate::KNormed),
                    spec.n_head_kv,
                    (
                        w.k_norm.as_deref(),
                        w.qk_norm_biases.as_ref().map(|b| &b[1]),
                    ),
                )?;
                [k, Left(Intermediate::V)]
            }
        };
        let place = self.batch.places[self.h.kv_layers[i]];
        self.transform(place.transformed[0], k, spec.n_head_kv, spec.head_dim)?;
        self.transform(place.transformed[1], v, spec.n_head_kv, spec.head_dim_v)?;
        let [key_bits, value_bits] = place.types.map(bits);
        let args = AppendArgs {
            n_rows: self.rows.n,
            n_pages: self.n_pages,
            n_head_kv: size(spec.n_head_kv)?,
            head_dim: size(spec.head_dim)?,
            head_dim_v: size(spec.head_dim_v)?,
            key_offset: size(place.keys)?,
            value_offset: size(place.values)?,
            key_bits: key_bits?,
            value_bits: value_bits?,
        };
        let buffers = [
            (k, 0),
            (v, 0),
            (Name::Input(Input::Rows(Set::All)), 0),
            (Name::Input(Input::Pages(place.group)), 0),
        ];
        self.push((&APPEND, DType::F32, 0), &args, &buffers, Some((i, true)));
        Ok(())
    }

    /// Attention of the current rows, whose queries are computed, and keys and values in the pages;
    /// stores its output.
    pub(super) fn attention(
        &mut self,
        i: usize,
        spec: &AttnSpec,
        w: &'m Attn,
    ) -> Result<(), GpuError> {
        let widest = size(spec.head_dim.max(spec.head_dim_v))?;
        let variant = HEAD_DIMS.iter().copied().find(|&d| d >= widest);
        let widths = [spec.head_dim, spec.head_dim_v];
        let whole =
            widths.iter().all(|n| n.is_multiple_of(8)) && spec.head_dim_v <= MAX_VALUES as usize;
        let Some(variant) = variant.filter(|_| whole && spec.n_head <= MAX_HEADS) else {
            return Err(refused(format!(
                "attention with {} heads of {} and {} values (layer {i})",
                spec.n_head, spec.head_dim, spec.head_dim_v
            )));
        };
        let n_q = self.rows.n as usize * spec.n_q();
        self.clip(spec, Intermediate::Q, n_q)?;
        let source = self.source(i, &self.h.layers[i]);
        let q = self.heads(
            spec,
            (Intermediate::Q, Intermediate::QNormed),
            spec.n_head,
            (
                w.q_norm.as_deref(),
                w.qk_norm_biases.as_ref().map(|b| &b[0]),
            ),
        )?;
        self.scale_queries(i, spec, w, q)?;
        let place = self.batch.places[self.h.kv_layers[i]];
        self.transform(place.transformed[0], q, spec.n_head, spec.head_dim)?;
        let mut args = self.attention_args(spec, place)?;
        let rows = self.rows.clone();
        let (row_data, pages) = (
            Name::Input(Input::Rows(rows.set)),
            Name::Input(Input::Pages(place.group)),
        );
        let (out, sinks) = (
            Left(Intermediate::KqvOut),
            Name::Constant(w.sinks.as_deref().unwrap_or(&NO_SINKS)),
        );
        let (n_q, n_out) = (size(spec.n_q())?, size(spec.n_out())?);
        let tile_rows = prompt_tile_rows(variant);
        let tiles = self.tiles(&rows, tile_rows);
        for run in rows.runs().into_iter().filter(|run| run.generated) {
            args.n_rows = run.n;
            let positions = rows
                .parts_of(run)
                .flat_map(|part| part.pos..part.pos + part.n);
            args.n_splits = positions
                .map(|pos| splits(pos, Window::of(spec)))
                .max()
                .unwrap_or(1);
            let here = (row_data, u64::from(run.first) * Element::Row.size());
            let partial = (Left(Intermediate::Partial), 0);
            let buffers = [(q, bytes(run.first, n_q)), here, (pages, 0), partial];
            self.push(
                (&ATTENTION_DECODE, DType::F32, variant),
                &args,
                &buffers,
                Some((source, false)),
            );
            let buffers = [partial, here, (sinks, 0), (out, bytes(run.first, n_out))];
            self.push((&ATTENTION_MERGE, DType::F32, 0), &args, &buffers, None);
        }
        if let Some((tiles, n_tiles)) = tiles {
            (args.n_rows, args.n_splits, args.n_tiles) = (rows.n, 0, n_tiles);
            let buffers = [q, row_data, pages, tiles, sinks, out].map(|name| (name, 0));
            self.push(
                (&ATTENTION_PROMPT, DType::F32, variant),
                &args,
                &buffers,
                Some((source, false)),
            );
        }
        self.transform(place.transformed[1], out, spec.n_head, spec.head_dim_v)?;
        let out = match spec.latent {
            Some(latent) if latent.absorbed => {
                let values = Left(Intermediate::HeadsOut);
                self.by_head(&w.wv.w, spec.n_head, out, values)?;
                values
            }
            _ => out,
        };
        self.gate(spec, out)?;
        let out = match &w.sub_norm {
            Some(norm) => {
                let normed = Left(Intermediate::KqvNormed);
                self.row_norm(norm, self.h.norm_eps, out, normed)?;
                normed
            }
            None => out,
        };
        self.linear(&w.wo, out, Left(Intermediate::AttnOut))
    }

    /// Arguments of attention without those of its rows.
    fn attention_args(&self, spec: &AttnSpec, place: PagePlace) -> Result<AttentionArgs, GpuError> {
        let [key_bits, value_bits] = place.types.map(bits);
        let window = Window::of(spec);
        Ok(AttentionArgs {
            n_rows: 0,
            n_head: size(spec.n_head)?,
            n_head_kv: size(spec.n_head_kv)?,
            head_dim: size(spec.head_dim)?,
            head_dim_v: size(spec.head_dim_v)?,
            key_offset: size(place.keys)?,
            value_offset: size(place.values)?,
            key_bits: key_bits?,
            value_bits: value_bits?,
            window: window.n,
            chunked: window.chunked.into(),
            n_pages: self.n_pages,
            n_splits: 0,
            n_tiles: 0,
            scale: spec.scale,
            softcap: spec.softcap.unwrap_or(0.0),
            alibi: spec.alibi.unwrap_or(0.0),
        })
    }

    /// Tiles of the rows of prompts, and their number.
    pub(super) fn tiles(&mut self, rows: &RowSet, tile_rows: u32) -> Option<(Name<'m>, u32)> {
        let input = Input::Tiles(rows.set, tile_rows);
        let known = self
            .plan
            .tiles
            .iter()
            .position(|(other, _)| *other == input);
        let at = known.unwrap_or_else(|| {
            let prompts = rows.parts.iter().filter(|part| !part.generated);
            let tiles = prompts.flat_map(|part| {
                let tile = move |i: u32| [part.first + i, tile_rows.min(part.n - i)];
                (0..part.n).step_by(tile_rows as usize).map(tile)
            });
            self.plan.tiles.push((input, tiles.collect()));
            self.plan.tiles.len() - 1
        });
        let n = self.plan.tiles[at].1.len() as u32;
        (n > 0).then_some((Name::Input(input), n))
    }
}
