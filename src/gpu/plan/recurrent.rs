//! Recurrent mixers in a plan.

use crate::compute::weight::Linear;
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::heads::HeadPart;
use crate::gpu::plan::{Input, Intermediate, Name, Planner, Set, refused, size};
use crate::kv::CellPlace;
use crate::layers::conv::parts_of;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::conv::weights::Conv;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::gated_delta::weights::{Delta, DeltaInput};
use crate::layers::gated_delta::{EPS, columns, n_feed};
use crate::layers::headed_mamba::spec::HeadedMambaSpec;
use crate::layers::headed_mamba::weights::HeadedMamba;
use crate::layers::mamba::spec::MambaSpec;
use crate::layers::mamba::weights::Mamba;
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

/// What recurrent mixers leave.
pub(super) const MIXED: Intermediate = Intermediate::Mixed(Set::All);

impl<'m> Planner<'m, '_> {
    /// Recurrent mixer on `normed`, without its output matrix: all rows change the state.
    pub(super) fn recurrence(
        &mut self,
        i: usize,
        (spec, w): (&RecurrentSpec, &'m Recurrent),
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        match (spec, w) {
            (RecurrentSpec::ShortConv(spec), Recurrent::ShortConv(w)) => {
                self.short_conv(i, *spec, w, normed)
            }
            (RecurrentSpec::Delta(spec), Recurrent::Delta(w)) => self.delta(i, spec, w, normed),
            (RecurrentSpec::Mamba2(spec), Recurrent::Mamba2(w)) => self.mamba2(i, spec, w, normed),
            (RecurrentSpec::Mamba(spec), Recurrent::Mamba(w)) => self.mamba(i, spec, w, normed),
            (RecurrentSpec::HeadedMamba(spec), Recurrent::HeadedMamba(w)) => {
                self.headed_mamba(i, spec, w, normed)
            }
            _ => Err(refused(format!("{} (layer {i})", spec.name()))),
        }
    }

    /// Place of a recurrence of the layer that is planned.
    fn cell(&self, number: usize) -> CellPlace {
        self.batch.cells[self.cells_before + number]
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
        let [beta, rate] = self.delta_input(spec, input, normed)?;
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
        spec: &DeltaSpec,
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
            DeltaInput::Low {
                qkv,
                beta: of_beta,
                rate: of_rate,
                gate,
            } => {
                let (part, low) = (Left(Intermediate::HeadsOut), Left(Intermediate::QLow));
                let (n_channel, mut first) = (spec.conv().n_channel, 0);
                for w in &**qkv {
                    let n = w.w.n_out;
                    self.linear(w, normed, part)?;
                    let channels = Rows::of(Intermediate::Channels, n_channel, first);
                    self.copy_rows(part, n, channels)?;
                    first += n;
                }
                products.push((of_beta, beta));
                for (w, to) in [(of_rate, rate), (gate, Left(Intermediate::Gate))] {
                    match &**w {
                        [down, up] => {
                            self.linear(down, normed, low)?;
                            self.linear(up, low, to)?;
                        }
                        whole => products.push((&whole[0], to)),
                    }
                }
                [beta, rate]
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
        self.keep_feeds(i, feed)
    }

    /// Copy of a scan's inputs.
    fn keep_feeds(&mut self, i: usize, feed: Rows<'m>) -> Result<(), GpuError> {
        let [n_slots, n_states] = self.n_slots()?;
        let args = KeepFeedsArgs {
            n_rows: self.rows.n,
            n_feed: size(feed.width)?,
            feeds: size(self.cell(1).feeds)?,
            n_slots,
            n_states,
        };
        let feed = feed.name;
        let (slots, states) = (Name::Input(Input::Slots), Name::Input(Input::States));
        let buffers = [feed, slots, states].map(|name| (name, 0));
        self.push(
            (&KEEP_FEEDS, DType::F32, 0),
            &args,
            &buffers,
            Some((i, true)),
        );
        Ok(())
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
        self.state_space(i, feed, [n_inner, n_head, n_group, n_state], [a, d])?;
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
        self.keep_feeds(i, feed)
    }

    /// Scan of a state space whose heads share a rate. Rows of `feed` are its inputs, what goes into the
    /// state and out of it by group, and time steps.
    fn state_space(
        &mut self,
        i: usize,
        feed: Rows<'m>,
        [n_inner, n_head, n_group, n_state]: [usize; 4],
        by_head: [&'m Vec<f32>; 2],
    ) -> Result<(), GpuError> {
        let (place, [n_slots, n_states]) = (self.cell(1), self.n_slots()?);
        let (width, of_groups) = (n_inner / n_head, n_group * n_state);
        let args = ScanArgs {
            n_rows: self.rows.n,
            n_feed: size(feed.width)?,
            n_head: size(n_head)?,
            n_head_k: size(n_group)?,
            head_dim_k: size(n_state)?,
            head_dim_v: size(width)?,
            v: 0,
            k: size(n_inner)?,
            q: size(n_inner + of_groups)?,
            beta: size(n_inner + 2 * of_groups)?,
            rate: 0, // from `beta`
            by_channel: 0,
            tiled: 0,
            columns: size(width)?,
            state: size(place.state)?,
            feeds: size(place.feeds)?,
            n_slots,
            n_states,
        };
        let kernel = (&SSM_SCAN, DType::F32, key_dim(n_state)?);
        let buffers = scan_buffers(feed, by_head);
        self.push(kernel, &args, &buffers, Some((i, true)));
        Ok(())
    }

    /// Convolved channels of a mixer whose input is `x`, and their products with one matrix, whose parts
    /// have RMS norms of these weights, if there are some; leaves the channels in front of rows of
    /// `n_feed` values.
    fn convolved(
        &mut self,
        i: usize,
        (spec, conv, x): (ConvSpec, &'m Conv, Rows<'m>),
        (of_channels, norms, eps): (&'m Linear, &'m [Vec<f32>], f32),
        (parts, n_feed): ([usize; 3], usize),
    ) -> Result<[Name<'m>; 3], GpuError> {
        use Intermediate::{Convolved, KvLow, OfConvolved};
        let n = spec.n_channel;
        self.causal_conv(i, (spec, conv, false), x, Rows::of(Convolved, n, 0))?;
        self.linear(of_channels, Left(Convolved), Left(KvLow))?;
        let (names, mut first) = ([0, 1, 2].map(|k| Left(OfConvolved(k))), 0);
        for (k, (&to, part)) in names.iter().zip(parts).enumerate() {
            let low = HeadPart::of(Left(KvLow), (1, parts.iter().sum()), first);
            self.copy_heads((1, part), low, HeadPart::of(to, (1, part), 0))?;
            if let Some(norm) = norms.get(k) {
                let args = NormArgs {
                    n: size(part)?,
                    n_rows: self.rows.n,
                    eps,
                };
                self.plain(&RMS_NORM_HEADS, &args, &[to, Name::Constant(norm)]);
            }
            first += part;
        }
        self.copy_rows(Left(Convolved), n, Rows::of(Intermediate::Feed, n_feed, 0))?;
        Ok(names)
    }

    /// Copies rows of `n` values into those of `to`.
    fn copy_rows(&mut self, x: Name<'m>, n: usize, to: Rows<'m>) -> Result<(), GpuError> {
        let to = HeadPart::of(to.name, (1, to.width), to.first);
        self.copy_heads((1, n), HeadPart::of(x, (1, n), 0), to)
    }

    /// Time steps `ln(1 + e^(w·x))`, and their number for each row.
    fn time_steps(&mut self, w: &'m Linear, x: Name<'m>) -> Result<(Name<'m>, usize), GpuError> {
        let (steps, n) = (Left(Intermediate::Rate), w.w.n_out);
        self.linear(w, x, steps)?;
        let all = self.rows.n as usize * n;
        self.unary(UnaryFunction::Softplus, [0.0; 4], steps, all)?;
        Ok((steps, n))
    }

    /// Mamba 1.
    fn mamba(
        &mut self,
        i: usize,
        spec: &MambaSpec,
        w: &'m Mamba,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        let Mamba {
            input,
            conv,
            x,
            norms,
            dt,
            a,
            d,
            output: _, // of all mixers alike
        } = w;
        let &MambaSpec {
            n_inner,
            n_state,
            dt_rank,
            ..
        } = spec;
        if n_state > CHANNEL_STATES as usize {
            return Err(refused(format!("channels with {n_state} states")));
        }
        let n_feed = 2 * (n_inner + n_state);
        self.linear(input, normed, Left(Intermediate::Channels))?;
        let channels = Rows::of(Intermediate::Channels, 2 * n_inner, 0);
        let [low, into, out_of] = self.convolved(
            i,
            (spec.conv(), conv, channels),
            (x, norms, spec.norm_eps(self.h.norm_eps)),
            ([dt_rank, n_state, n_state], n_feed),
        )?;
        let (steps, n) = self.time_steps(dt, low)?;
        let part = |first| Rows::of(Intermediate::Feed, n_feed, first);
        self.copy_rows(steps, n, part(n_inner))?;
        self.copy_rows(into, n_state, part(2 * n_inner))?;
        self.copy_rows(out_of, n_state, part(2 * n_inner + n_state))?;
        let (place, feed) = (self.cell(1), Rows::of(Intermediate::Feed, n_feed, 0));
        let [n_slots, n_states] = self.n_slots()?;
        let args = ChannelScanArgs {
            n_rows: self.rows.n,
            n_channel: size(n_inner)?,
            n_state: size(n_state)?,
            n_block: size(spec.n_block())?,
            state: size(place.state)?,
            feeds: size(place.feeds)?,
            n_slots,
            n_states,
        };
        let buffers = scan_buffers(feed, [a, d]);
        let kernel = (&CHANNEL_SCAN, DType::F32, 0);
        self.push(kernel, &args, &buffers, Some((i, true)));
        let gates = GatedGroupsArgs {
            n: size(n_inner)?,
            n_rows: self.rows.n,
            n_group: 1,
            n_in: size(2 * n_inner)?,
            n_norm: 0,
            eps: 0.0,
        };
        // Gates are the second half of each row.
        let gate = (channels.name, 4 * n_inner as u64);
        let buffers = [(Left(MIXED), 0), gate, (Name::Constant(d), 0)];
        self.push((&GATED_GROUPS, DType::F32, 0), &gates, &buffers, None);
        self.keep_feeds(i, feed)
    }

    /// Mamba of PLaMo 2.
    fn headed_mamba(
        &mut self,
        i: usize,
        spec: &HeadedMambaSpec,
        w: &'m HeadedMamba,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        let HeadedMamba {
            input,
            conv,
            x,
            norms,
            dt,
            a,
            d,
            output: _, // of all mixers alike
        } = w;
        let &HeadedMambaSpec {
            n_inner,
            n_head,
            n_state,
            dt_rank,
            ..
        } = spec;
        let (width, n_feed) = (n_inner / n_head, spec.n_feed());
        let (whole, parts) = (Left(Intermediate::QWhole), (n_head, width));
        self.linear(input, normed, whole)?;
        // Gates and channels of each head.
        for (to, first) in [(Intermediate::Gate, 0), (Intermediate::Channels, width)] {
            let from = HeadPart::of(whole, (n_head, 2 * width), first);
            self.copy_heads(parts, from, HeadPart::of(Left(to), parts, 0))?;
        }
        let channels = Rows::of(Intermediate::Channels, n_inner, 0);
        let [into, out_of, low] = self.convolved(
            i,
            (spec.conv(), conv, channels),
            (x, norms, self.h.norm_eps),
            ([n_state, n_state, dt_rank], n_feed),
        )?;
        let (steps, n) = self.time_steps(dt, low)?;
        let part = |first| Rows::of(Intermediate::Feed, n_feed, first);
        self.copy_rows(into, n_state, part(n_inner))?;
        self.copy_rows(out_of, n_state, part(n_inner + n_state))?;
        self.copy_rows(steps, n, part(n_inner + 2 * n_state))?;
        let feed = Rows::of(Intermediate::Feed, n_feed, 0);
        self.state_space(i, feed, [n_inner, n_head, 1, n_state], [a, d])?;
        let args = ElementwiseArgs {
            n: size(self.rows.n as usize * n_inner)?,
        };
        let (gate, out) = (Left(Intermediate::Gate), Left(MIXED));
        self.plain(&SILU_MUL, &args, &[gate, out]);
        self.copy_rows(gate, n_inner, Rows::of(MIXED, n_inner, 0))?;
        self.keep_feeds(i, feed)
    }
}

/// Buffers of a scan of a state space, with the rates and factors of its heads or channels.
fn scan_buffers<'m>(feed: Rows<'m>, [a, d]: [&'m Vec<f32>; 2]) -> [(Name<'m>, u64); 6] {
    [
        feed.name,
        Name::Constant(a),
        Name::Constant(d),
        Name::Input(Input::Slots),
        Name::Input(Input::States),
        Left(MIXED),
    ]
    .map(|name| (name, 0))
}
