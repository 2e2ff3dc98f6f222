//! Recurrent mixers in a plan.

use crate::compute::weight::Linear;
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::{Input, Intermediate, Name, Planner, RowSet, Set, refused, size};
use crate::kv::CellPlace;
use crate::layers::conv::parts_of;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::conv::weights::Conv;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::gated_delta::weights::{Delta, DeltaInput};
use crate::layers::gated_delta::{EPS, columns, n_feed};
use crate::layers::mamba2::spec::Mamba2Spec;
use crate::layers::mamba2::weights::Mamba2;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::recurrent::weights::Recurrent;
use crate::layers::short_conv::weights::ShortConv;
use crate::quant::DType;

/// Rows of values: a buffer, their width, and the column from which on they are meant.
#[derive(Clone, Copy)]
struct Rows<'m> {
    name: Name<'m>,
    width: usize,
    first: usize,
}

impl<'m> Rows<'m> {
    fn of(intermediate: Intermediate, width: usize, first: usize) -> Rows<'m> {
        Rows {
            name: Left(intermediate),
            width,
            first,
        }
    }
}

/// Variant of the kernels of states for keys of so many values.
fn key_dim(n: usize) -> Result<u32, GpuError> {
    let fits = KEY_DIMS.iter().find(|&&most| n <= most as usize);
    fits.copied()
        .ok_or_else(|| refused(format!("states with keys of {n} values")))
}

const MIXED: Intermediate = Intermediate::Mixed(Set::All);

impl<'m> Planner<'m, '_> {
    /// Recurrent mixer on `normed`: all rows change the state. With its output matrix, of the rows that
    /// are left; returns their input, or `None` if there are none.
    pub(super) fn recurrent_mixer(
        &mut self,
        i: usize,
        (spec, w): (&RecurrentSpec, &'m Recurrent),
        mut normed: Name<'m>,
        outputs: Option<&RowSet>,
    ) -> Result<Option<Name<'m>>, GpuError> {
        match (spec, w) {
            (RecurrentSpec::ShortConv(spec), Recurrent::ShortConv(w)) => {
                self.short_conv(i, *spec, w, normed)?
            }
            (RecurrentSpec::Delta(spec), Recurrent::Delta(w)) => self.delta(i, spec, w, normed)?,
            (RecurrentSpec::Mamba2(spec), Recurrent::Mamba2(w)) => {
                self.mamba2(i, spec, w, normed)?
            }
            _ => return Err(refused(format!("{} (layer {i})", spec.name()))),
        }
        let Some(output) = w.output() else {
            return Err(refused(format!("the output of layer {i}")));
        };
        let mut mixed = MIXED;
        if let Some(outputs) = outputs {
            if outputs.n == 0 {
                return Ok(None);
            }
            mixed = Intermediate::Mixed(Set::Outputs);
            self.gather(Left(MIXED), mixed, outputs.n, size(output.w.n_in)?);
            normed = self.only_outputs(normed, outputs)?;
        }
        self.linear(output, Left(mixed), Left(Intermediate::AttnOut))?;
        Ok(Some(normed))
    }

    /// Place of a recurrence of the layer that is planned.
    fn cell(&self, number: usize) -> CellPlace {
        self.batch.cells[self.n_before[1] + number]
    }

    /// Slots, and pages of states, of a pass.
    fn n_slots(&self) -> Result<[u32; 2], GpuError> {
        let slots = self.batch.slots;
        let n_states = slots.iter().map(|slot| slot.states.len()).sum();
        Ok([size(slots.len())?, size(n_states)?])
    }

    /// A causal convolution of channels of `x`, to `out`.
    fn causal_conv(
        &mut self,
        i: usize,
        (spec, w, gated): (ConvSpec, &'m Conv, bool),
        x: Rows<'m>,
        out: Rows<'m>,
    ) -> Result<(), GpuError> {
        if spec.n_tap > CONV_ROWS as usize {
            return Err(refused(format!("a convolution over {} tokens", spec.n_tap)));
        }
        let place = self.cell(0);
        let n_longest = self.batch.slots.iter().map(|slot| slot.rows.len()).max();
        let [n_slots, n_states] = self.n_slots()?;
        let args = CausalConvArgs {
            n_rows: self.rows.n,
            n_longest: size(n_longest.unwrap_or(0))?,
            n_in: size(x.width)?,
            first: size(x.first)?,
            n_channel: size(spec.n_channel)?,
            n_tap: size(spec.n_tap)?,
            n_bias: size(w.bias.len())?,
            n_out: size(out.width)?,
            part: size(spec.n_channel / parts_of(spec.n_channel))?,
            gated: gated.into(),
            state: size(place.state)?,
            feeds: size(place.feeds)?,
            n_slots,
            n_states,
        };
        let bias = if w.bias.is_empty() { &w.taps } else { &w.bias };
        let buffers = [
            (x.name, 0),
            (Name::Constant(&w.taps), 0),
            (Name::Constant(bias), 0),
            (Name::Input(Input::Slots), 0),
            (Name::Input(Input::States), 0),
            (out.name, 0),
        ];
        let pages = Some((i, true));
        self.push((&CAUSAL_CONV, DType::F32, 0), &args, &buffers, pages);
        Ok(())
    }

    /// Gated short convolution of LFM2.
    fn short_conv(
        &mut self,
        i: usize,
        spec: ConvSpec,
        w: &'m ShortConv,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        let ShortConv {
            input,
            conv,
            output: _, // of all mixers alike
        } = w;
        let n = spec.n_channel;
        self.linear(input, normed, Left(Intermediate::Channels))?;
        let x = Rows::of(Intermediate::Channels, 3 * n, 2 * n);
        let out = Rows::of(MIXED, n, 0);
        self.causal_conv(i, (spec, conv, true), x, out)
    }

    /// Gated delta rule.
    fn delta(
        &mut self,
        i: usize,
        spec: &DeltaSpec,
        w: &'m Delta,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        let Delta {
            input,
            conv,
            a,
            dt_bias,
            norm,
            output: _, // of all mixers alike
        } = w;
        let (n_channel, width, n_head) = (spec.conv().n_channel, n_feed(spec), size(spec.n_head)?);
        let [beta, rate] = self.delta_input(input, normed)?;
        let x = Rows::of(Intermediate::Channels, n_channel, 0);
        let feed = Rows::of(Intermediate::Feed, width, 0);
        self.causal_conv(i, (spec.conv(), conv, false), x, feed)?;
        let args = DeltaFeedArgs {
            n_rows: self.rows.n,
            n_feed: size(width)?,
            n_head,
            n_head_k: size(spec.n_head_k)?,
            head_dim_k: size(spec.head_dim_k)?,
            n_rate: size(spec.n_rate())?,
            fused: spec.fused.into(),
            bound: spec.bound.unwrap_or(0.0),
            length_eps: spec.length_eps.unwrap_or(EPS),
        };
        let constants = [a, dt_bias].map(|x| Name::Constant(x));
        let buffers = [feed.name, beta, rate, constants[0], constants[1]];
        self.plain(&DELTA_FEED, &args, &buffers);
        self.delta_rule(i, spec, feed)?;
        let args = GatedNormArgs {
            n: size(spec.head_dim_v)?,
            n_rows: size(self.rows.n as usize * spec.n_head)?,
            eps: self.h.norm_eps,
            sigmoid: (spec.by_channel || spec.sigmoid_gate).into(),
        };
        let gate = Left(Intermediate::Gate);
        let buffers = [Left(MIXED), gate, Name::Constant(norm)];
        self.plain(&GATED_NORM_HEADS, &args, &buffers);
        Ok(())
    }

    /// Products of a delta rule's input: channels, gates, strengths and rates; returns the buffers of
    /// the last two.
    fn delta_input(
        &mut self,
        input: &'m DeltaInput,
        normed: Name<'m>,
    ) -> Result<[Name<'m>; 2], GpuError> {
        let (beta, rate) = (Left(Intermediate::Beta), Left(Intermediate::Rate));
        let mut products: Vec<(&'m Linear, Name<'m>)> = Vec::new();
        let buffers = match input {
            DeltaInput::Fused {
                qkv,
                gate,
                beta_rate,
            } => {
                products.push((qkv, Left(Intermediate::Channels)));
                products.push((gate, Left(Intermediate::Gate)));
                products.push((beta_rate, beta));
                [beta, beta]
            }
            DeltaInput::Split {
                qkv,
                gate,
                beta: of_beta,
                rate: of_rate,
            } => {
                products.push((qkv, Left(Intermediate::Channels)));
                products.push((gate, Left(Intermediate::Gate)));
                products.push((of_beta, beta));
                products.push((of_rate, rate));
                [beta, rate]
            }
            DeltaInput::Low { .. } => {
                return Err(refused("delta rules of three matrices".to_string()));
            }
        };
        for (w, to) in products {
            self.linear(w, normed, to)?;
        }
        Ok(buffers)
    }

    /// The rule itself, and the copy of its inputs.
    fn delta_rule(&mut self, i: usize, spec: &DeltaSpec, feed: Rows<'m>) -> Result<(), GpuError> {
        let place = self.cell(1);
        let [n_slots, n_states] = self.n_slots()?;
        let (n_k, n_channel) = (spec.n_head_k * spec.head_dim_k, spec.conv().n_channel);
        let (feeds, n_feed) = (size(place.feeds)?, size(feed.width)?);
        let args = ScanArgs {
            n_rows: self.rows.n,
            n_feed,
            n_head: size(spec.n_head)?,
            n_head_k: size(spec.n_head_k)?,
            head_dim_k: size(spec.head_dim_k)?,
            head_dim_v: size(spec.head_dim_v)?,
            q: 0,
            k: size(n_k)?,
            v: size(2 * n_k)?,
            beta: size(n_channel)?,
            rate: size(n_channel + spec.n_head)?,
            by_channel: spec.by_channel.into(),
            tiled: spec.tiled.into(),
            columns: size(columns(spec))?,
            state: size(place.state)?,
            feeds,
            n_slots,
            n_states,
        };
        let (slots, states) = (Name::Input(Input::Slots), Name::Input(Input::States));
        let buffers = [feed.name, slots, states, Left(MIXED)].map(|name| (name, 0));
        let kernel = (&DELTA_RULE, DType::F32, key_dim(spec.head_dim_k)?);
        self.push(kernel, &args, &buffers, Some((i, true)));
        self.keep_feeds(i, &args, feed.name);
        Ok(())
    }

    /// Copy of a scan's inputs.
    fn keep_feeds(&mut self, i: usize, scan: &ScanArgs, feed: Name<'m>) {
        let args = KeepFeedsArgs {
            n_rows: scan.n_rows,
            n_feed: scan.n_feed,
            feeds: scan.feeds,
            n_slots: scan.n_slots,
            n_states: scan.n_states,
        };
        let (slots, states) = (Name::Input(Input::Slots), Name::Input(Input::States));
        let buffers = [feed, slots, states].map(|name| (name, 0));
        self.push(
            (&KEEP_FEEDS, DType::F32, 0),
            &args,
            &buffers,
            Some((i, true)),
        );
    }

    /// Mamba 2.
    fn mamba2(
        &mut self,
        i: usize,
        spec: &Mamba2Spec,
        w: &'m Mamba2,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        let Mamba2 {
            input,
            conv,
            dt_bias,
            a,
            d,
            norm,
            output: _, // of all mixers alike
        } = w;
        let &Mamba2Spec {
            n_inner,
            n_head,
            n_group,
            n_state,
            ..
        } = spec;
        let n_channel = spec.conv().n_channel;
        let (n_in, n_feed) = (n_inner + n_channel + n_head, n_channel + n_head);
        self.linear(input, normed, Left(Intermediate::Channels))?;
        let x = Rows::of(Intermediate::Channels, n_in, n_inner);
        let feed = Rows::of(Intermediate::Feed, n_feed, 0);
        self.causal_conv(i, (spec.conv(), conv, false), x, feed)?;
        let args = TimeStepsArgs {
            n_rows: self.rows.n,
            n_in: size(n_in)?,
            n_feed: size(n_feed)?,
            n_head: size(n_head)?,
        };
        self.plain(
            &TIME_STEPS,
            &args,
            &[x.name, Name::Constant(dt_bias), feed.name],
        );
        let place = self.cell(1);
        let [n_slots, n_states] = self.n_slots()?;
        let args = ScanArgs {
            n_rows: self.rows.n,
            n_feed: size(n_feed)?,
            n_head: size(n_head)?,
            n_head_k: size(n_group)?,
            head_dim_k: size(n_state)?,
            head_dim_v: size(n_inner / n_head)?,
            v: 0,
            k: size(n_inner)?,
            q: size(n_inner + n_group * n_state)?,
            beta: size(n_channel)?,
            rate: 0, // from `beta`
            by_channel: 0,
            tiled: 0,
            columns: size(n_inner / n_head)?,
            state: size(place.state)?,
            feeds: size(place.feeds)?,
            n_slots,
            n_states,
        };
        let buffers = [
            feed.name,
            Name::Constant(a),
            Name::Constant(d),
            Name::Input(Input::Slots),
            Name::Input(Input::States),
            Left(MIXED),
        ]
        .map(|name| (name, 0));
        let kernel = (&SSM_SCAN, DType::F32, key_dim(n_state)?);
        self.push(kernel, &args, &buffers, Some((i, true)));
        let groups = GatedGroupsArgs {
            n: size(n_inner / n_group)?,
            n_rows: self.rows.n,
            n_group: size(n_group)?,
            n_in: size(n_in)?,
            n_norm: size(norm.as_ref().map_or(0, Vec::len))?,
            eps: self.h.norm_eps,
        };
        let weights = Name::Constant(norm.as_ref().unwrap_or(d));
        self.plain(&GATED_GROUPS, &groups, &[Left(MIXED), x.name, weights]);
        self.keep_feeds(i, &args, feed.name);
        Ok(())
    }
}
