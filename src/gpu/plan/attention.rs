//! Attention in a plan.

use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::{
    Input, Intermediate, MAX_HEADS, NO_SINKS, Name, Planner, RowSet, Set, bits, bytes, refused,
    size,
};
use crate::kv::PagePlace;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::rope::spec::RopeOrder;
use crate::quant::DType;

/// Splits of the keys that a generated row at `pos` sees, all or the last `window` if that is not 0.
pub(super) fn splits(pos: u32, window: u32) -> u32 {
    let first = match window {
        0 => 0,
        window => (pos + 1).saturating_sub(window),
    };
    pos / SPLIT - first / SPLIT + 1
}

impl<'m> Planner<'m, '_> {
    /// Norm and rotation of heads; returns the buffer with the result.
    pub(super) fn heads(
        &mut self,
        spec: &AttnSpec,
        (from, normed): (Intermediate, Intermediate),
        n_head: usize,
        norm: Option<&'m Vec<f32>>,
    ) -> Result<Name<'m>, GpuError> {
        let (rows, width) = (self.rows.n, n_head * spec.head_dim);
        let mut x = Left(from);
        let (n_head, head_dim, eps) = (size(n_head)?, size(spec.head_dim)?, self.h.norm_eps);
        match (spec.qk_norm, norm) {
            (Some(QkNorm::PerHead), Some(w)) => {
                let args = NormArgs {
                    n: head_dim,
                    n_rows: size(rows as usize * n_head as usize)?,
                    eps,
                };
                self.plain(&RMS_NORM_HEADS, &args, &[x, Name::Constant(w)]);
            }
            (Some(QkNorm::Full), Some(w)) => {
                let args = NormArgs {
                    n: size(width)?,
                    n_rows: rows,
                    eps,
                };
                self.plain(&RMS_NORM, &args, &[x, Name::Constant(w), Left(normed)]);
                x = Left(normed);
            }
            (
                Some(
                    QkNorm::PerHeadRotated
                    | QkNorm::PlainRotated
                    | QkNorm::LayerByHead
                    | QkNorm::LayerFull
                    | QkNorm::RmsByHead,
                )
                | None,
                _,
            )
            | (_, None) => {} // the ones are in `supports`
        }
        if let Some(id) = spec.rope {
            let rope = &self.h.ropes[id.index()];
            let args = RopeArgs {
                n_rows: rows,
                n_head,
                head_dim,
                n_dims: size(rope.n_dims)?,
            };
            let kernel = match rope.order {
                RopeOrder::Norm => &ROPE_NORM,
                RopeOrder::NeoX => &ROPE_NEOX,
            };
            self.plain(
                kernel,
                &args,
                &[x, Name::Input(Input::Angles(self.rows.set, id.index()))],
            );
        }
        Ok(x)
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
        self.linear(&w.wk, normed, Left(Intermediate::K))?;
        self.linear(&w.wv, normed, Left(Intermediate::V))?;
        let k = self.heads(
            spec,
            (Intermediate::K, Intermediate::KNormed),
            spec.n_head_kv,
            w.k_norm.as_ref(),
        )?;
        let place = self.batch.places[self.n_before[0]];
        self.transform(place.transformed[0], k, spec.n_head_kv, spec.head_dim)?;
        let v = Left(Intermediate::V);
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
        let whole = widths.iter().all(|n| n.is_multiple_of(8));
        let Some(variant) = variant.filter(|_| whole && spec.n_head <= MAX_HEADS) else {
            return Err(refused(format!(
                "attention with {} heads of {} and {} values (layer {i})",
                spec.n_head, spec.head_dim, spec.head_dim_v
            )));
        };
        let q = self.heads(
            spec,
            (Intermediate::Q, Intermediate::QNormed),
            spec.n_head,
            w.q_norm.as_ref(),
        )?;
        let place = self.batch.places[self.n_before[0]];
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
                .map(|pos| splits(pos, args.window))
                .max()
                .unwrap_or(1);
            let here = (row_data, u64::from(run.first) * Element::Row.size());
            let partial = (Left(Intermediate::Partial), 0);
            let buffers = [(q, bytes(run.first, n_q)), here, (pages, 0), partial];
            self.push(
                (&ATTENTION_DECODE, DType::F32, variant),
                &args,
                &buffers,
                Some((i, false)),
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
                Some((i, false)),
            );
        }
        self.transform(place.transformed[1], out, spec.n_head, spec.head_dim_v)?;
        self.linear(&w.wo, out, Left(Intermediate::AttnOut))
    }

    /// Arguments of attention without those of its rows.
    fn attention_args(&self, spec: &AttnSpec, place: PagePlace) -> Result<AttentionArgs, GpuError> {
        let [key_bits, value_bits] = place.types.map(bits);
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
            // A window too large for 32 bits has no effect.
            window: spec
                .window
                .and_then(|window| u32::try_from(window).ok())
                .unwrap_or(0),
            n_pages: self.n_pages,
            n_splits: 0,
            n_tiles: 0,
            scale: spec.scale,
            softcap: spec.softcap.unwrap_or(0.0),
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
