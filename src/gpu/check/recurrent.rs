//! Recurrent layers, with states in pages.

use crate::arch::Arch;
use crate::gpu::check::{Checker, Data, EPS, FAST, Handle, Lcg, close, same};
use crate::gpu::kernels::*;
use crate::layers::activation::sigmoid;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::conv::weights::Conv;
use crate::layers::conv::{CausalConv, parts_of};
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::gated_delta::{Rule, columns, n_feed};
use crate::layers::mamba2::softplus;
use crate::layers::recurrence::Recurrence;
use crate::quant::DType;

/// Values of a page before those of the recurrence, as if of another one.
const BEFORE: usize = 12;
/// Rows of inputs that a page has.
const N_FEEDS: usize = 64;

/// A sequence: the positions of the state that a pass begins with and of its first row, its number of
/// rows, and positions besides its end at which states are written.
type Span = (usize, usize, usize, &'static [usize]);

/// From zeros; one token; tokens that are replayed, with states among them; so many that the inputs of
/// the rows take the places of theirs.
const SPANS: &[Span] = &[
    (0, 0, 70, &[6, 64]),
    (67, 67, 1, &[]),
    (60, 63, 5, &[62, 64]),
    (130, 190, 40, &[166, 192]),
];

/// A recurrence with the sizes of its state and of its inputs per token.
struct Cell<'a> {
    recurrence: &'a dyn Recurrence,
    n_state: usize,
    n_feed: usize,
}

/// What a sequence has, and what becomes of it.
struct Sequence {
    span: Span,
    /// State at the beginning; empty for zeros.
    begin: Vec<f32>,
    /// Inputs of the tokens from there on.
    feeds: Vec<f32>,
    out: Vec<f32>,
    /// States by position.
    states: Vec<(usize, Vec<f32>)>,
}

impl Sequence {
    /// A sequence whose inputs are rows of `feed`.
    fn new(
        cell: &Cell<'_>,
        span: Span,
        lcg: &mut Lcg,
        feed: &dyn Fn(&mut Lcg) -> Vec<f32>,
    ) -> Self {
        let (start, pos, n, stops) = span;
        let mut state: Vec<f32> = lcg.values(cell.n_state);
        state.iter_mut().for_each(|x| *x *= 0.1);
        let begin = if start > 0 { state.clone() } else { Vec::new() };
        if start == 0 {
            state.fill(0.0);
        }
        let n_parts = cell.recurrence.n_parts();
        let (n_out, n_state) = (cell.recurrence.n_out() / n_parts, cell.n_state / n_parts);
        let (mut feeds, mut all, mut states) = (Vec::new(), Vec::new(), Vec::new());
        for position in start..pos + n {
            let row = feed(lcg);
            let mut out = vec![0.0; cell.recurrence.n_out()];
            for (part, (state, out)) in state
                .chunks_exact_mut(n_state)
                .zip(out.chunks_exact_mut(n_out))
                .enumerate()
            {
                cell.recurrence.step(Arch::scalar(), part, state, &row, out);
            }
            if position >= pos {
                all.extend(out);
            }
            feeds.extend(row);
            if stops.contains(&(position + 1)) || position + 1 == pos + n {
                states.push((position + 1, state.clone()));
            }
        }
        Sequence {
            span,
            begin,
            feeds,
            out: all,
            states,
        }
    }

    /// Inputs of the rows.
    fn rows<'s>(&'s self, cell: &Cell<'_>) -> &'s [f32] {
        &self.feeds[(self.span.1 - self.span.0) * cell.n_feed..]
    }
}

/// Pages of sequences on a GPU, and the kernels' buffers for them.
struct Pages {
    /// Of each sequence: that of inputs, then those of states that are written.
    of: Vec<(Handle, Vec<Handle>)>,
    all: Vec<Handle>,
    slots: Vec<u32>,
    states: Handle,
    n_states: usize,
}

impl Pages {
    fn new(gpu: &mut Checker<'_>, cell: &Cell<'_>, sequences: &[Sequence]) -> Pages {
        let n_states: usize = sequences.iter().map(|s| 2 + s.states.len()).sum();
        let states = gpu.stage.empty(16 * n_states as u64, 16);
        let (mut of, mut all, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut row, mut next) = (0, 0);
        for s in sequences {
            let (start, pos, n, _) = s.span;
            slots.extend([row, n, next, 2 + s.states.len()].map(|n| n as u32));
            row += n;
            let mut add = |gpu: &mut Checker<'_>, position: usize, page: Option<&[f32]>| {
                let at = 16 * next as u64;
                next += 1;
                let rest = [position as u32, 0];
                gpu.stage.fill(states, at + 8, bytemuck::cast_slice(&rest));
                let Some(values) = page else {
                    gpu.stage.fill(states, at, &[0; 8]);
                    return None;
                };
                let values = [&[f32::NAN; BEFORE][..], values].concat();
                let page = gpu.stage.filled(bytemuck::cast_slice(&values), 4);
                gpu.stage.point(states, at, page);
                all.push(page);
                Some(page)
            };
            add(gpu, start, (start > 0).then_some(&s.begin));
            let mut kept = vec![f32::NAN; N_FEEDS * cell.n_feed];
            let replayed = s.feeds.chunks_exact(cell.n_feed).take(pos - start);
            for (position, feed) in (start..).zip(replayed) {
                kept[position % N_FEEDS * cell.n_feed..][..cell.n_feed].copy_from_slice(feed);
            }
            let feeds = add(gpu, pos, Some(&kept));
            let unwritten = vec![f32::NAN; cell.n_state];
            let to = s.states.iter();
            let to = to.filter_map(|(position, _)| add(gpu, *position, Some(&unwritten)));
            of.extend(feeds.map(|feeds| (feeds, to.collect())));
        }
        Pages {
            of,
            all,
            slots,
            states,
            n_states,
        }
    }

    /// The values of a page, of which those before the recurrence's must be as they were.
    fn read(gpu: &mut Checker<'_>, page: Handle) -> Result<Vec<f32>, String> {
        let bytes = gpu.stage.read(page)?;
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
        if values[..BEFORE].iter().any(|x| !x.is_nan()) {
            return Err("result: values of another recurrence are overwritten".to_string());
        }
        Ok(values[BEFORE..].to_vec())
    }

    /// Compares the states that were written.
    fn check_states(
        &self,
        gpu: &mut Checker<'_>,
        sequences: &[Sequence],
        tolerance: f32,
    ) -> Result<(), String> {
        for (s, (_, to)) in sequences.iter().zip(&self.of) {
            for ((position, expected), &page) in s.states.iter().zip(to) {
                let what = format!("state at {position} of {:?}", s.span);
                close(&what, &Pages::read(gpu, page)?, expected, |_| tolerance)?;
            }
        }
        Ok(())
    }

    /// Compares the inputs that are kept: those of the last tokens.
    fn check_feeds(
        &self,
        gpu: &mut Checker<'_>,
        cell: &Cell<'_>,
        sequences: &[Sequence],
    ) -> Result<(), String> {
        for (s, (feeds, _)) in sequences.iter().zip(&self.of) {
            let kept = Pages::read(gpu, *feeds)?;
            let (start, pos, n, _) = s.span;
            let n_known = (pos + n - start).min(N_FEEDS);
            for position in pos + n - n_known..pos + n {
                let expected = &s.feeds[(position - start) * cell.n_feed..][..cell.n_feed];
                let found = &kept[position % N_FEEDS * cell.n_feed..][..cell.n_feed];
                same(
                    &format!("inputs at {position} of {:?}", s.span),
                    found,
                    expected,
                )?;
            }
        }
        Ok(())
    }
}

/// Runs a check twice if calls are, with other orders of threads: each has pages of its own, which
/// calls change.
fn repeated(
    gpu: &mut Checker<'_>,
    run: &dyn Fn(&mut Checker<'_>) -> Result<(), String>,
) -> Result<(), String> {
    let twice = std::mem::replace(&mut gpu.twice, false);
    let mut result = run(gpu);
    if twice {
        gpu.stage.shuffle(12345);
        result = result.and_then(|()| run(gpu));
        gpu.stage.shuffle(0);
    }
    gpu.twice = twice;
    result
}

pub(super) fn causal_conv(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(30);
    for (n_channel, n_tap, has_bias, gated) in [
        (96, 4, true, false),
        (256, 2, false, false),
        (80, 3, false, true),
        (3, 2, true, true),
    ] {
        let spec = ConvSpec { n_channel, n_tap };
        let bias = if has_bias {
            lcg.values(n_channel)
        } else {
            Vec::new()
        };
        let w = Conv::new(&lcg.values(n_channel * n_tap), n_tap, bias);
        let cell = Cell {
            recurrence: &CausalConv {
                spec,
                w: &w,
                silu: !gated,
            },
            n_state: n_channel * (n_tap - 1),
            n_feed: n_channel,
        };
        let sequences: Vec<_> = SPANS
            .iter()
            .map(|span| Sequence::new(&cell, *span, &mut lcg, &|lcg| lcg.values(n_channel)))
            .collect();
        let seed = lcg.next();
        repeated(gpu, &|gpu| {
            conv_once(gpu, (spec, &w, gated), &cell, &sequences, seed)
        })?;
    }
    Ok(())
}

/// The channels stand between others, also in the output.
fn conv_once(
    gpu: &mut Checker<'_>,
    (spec, w, gated): (ConvSpec, &Conv, bool),
    cell: &Cell<'_>,
    sequences: &[Sequence],
    seed: u32,
) -> Result<(), String> {
    let (n, mut lcg) = (spec.n_channel, Lcg(seed.into()));
    let (first, n_in, n_out) = (2 * n, 3 * n + 5, n + 7);
    let (mut x, mut expected) = (Vec::new(), Vec::new());
    for s in sequences {
        for (feed, out) in s.rows(cell).chunks_exact(n).zip(s.out.chunks_exact(n)) {
            let mut row = lcg.values(n_in);
            for c in 0..n {
                // A power of two, by which the product is exact.
                row[c] = if gated { 0.5 } else { f32::NAN };
                row[first + c] = if gated { 2.0 * feed[c] } else { feed[c] };
            }
            let gate = |c: usize| if gated { row[n + c] } else { 1.0 };
            expected.extend((0..n).map(|c| out[c] * gate(c)));
            x.extend(row);
        }
    }
    let pages = Pages::new(gpu, cell, sequences);
    let n_rows = x.len() / n_in;
    let args = CausalConvArgs {
        n_rows: n_rows as u32,
        n_longest: sequences.iter().map(|s| s.span.2).max().unwrap_or(0) as u32,
        n_in: n_in as u32,
        first: first as u32,
        n_channel: n as u32,
        n_tap: spec.n_tap as u32,
        n_bias: w.bias.len() as u32,
        n_out: n_out as u32,
        part: (n / parts_of(n)) as u32,
        gated: gated.into(),
        state: BEFORE as u32,
        feeds: BEFORE as u32,
        n_slots: sequences.len() as u32,
        n_states: pages.n_states as u32,
    };
    let out = vec![7.0f32; n_rows * n_out];
    let out = gpu.stage.filled(bytemuck::cast_slice(&out), 4);
    let data = [
        Data::F32(&x),
        Data::F32(&w.taps),
        Data::F32(&w.bias),
        Data::U32(&pages.slots),
        Data::Made(pages.states),
        Data::Made(out),
    ];
    gpu.call(&CAUSAL_CONV, DType::F32, 0, &args, &data, &pages.all)?;
    let found: Vec<f32> = bytemuck::pod_collect_to_vec(&gpu.stage.read(out)?);
    let what = format!("causal_conv {n} {gated}");
    let rows = found.chunks_exact(n_out);
    let ours: Vec<f32> = rows.clone().flat_map(|row| &row[..n]).copied().collect();
    // Terms are below 1; the activation's slope is below 1.1.
    let tolerance = (4 * spec.n_tap * spec.n_tap + 4) as f32 * EPS + 2.0 * FAST;
    close(&what, &ours, &expected, |_| tolerance)?;
    let others: Vec<f32> = rows.flat_map(|row| &row[n..]).copied().collect();
    same(&what, &others, &vec![7.0; others.len()])?;
    pages.check_states(gpu, sequences, 0.0)?;
    pages.check_feeds(gpu, cell, sequences)
}

/// Sizes of rules: value heads that share a head of keys are neighbours, or not; rates are of heads,
/// or of key dimensions; columns do not fill the last threadgroup, and keys not the threads.
fn rules() -> Vec<DeltaSpec> {
    let rule = |n_head: usize, n_head_k: usize, head_dim_k: usize, head_dim_v: usize| DeltaSpec {
        n_head,
        n_head_k,
        head_dim_k,
        head_dim_v,
        n_tap: 4,
        ..DeltaSpec::default()
    };
    vec![
        rule(4, 2, 20, 24),
        DeltaSpec {
            tiled: true,
            ..rule(4, 2, 35, 16)
        },
        DeltaSpec {
            by_channel: true,
            ..rule(1, 1, 128, 64)
        },
        rule(2, 1, 136, 8),
    ]
}

/// Inputs with normalised keys, and rates below 0.8, so that what goes before is forgotten: a column
/// of the state is not longer than 5.
fn delta_feed_of(spec: &DeltaSpec, lcg: &mut Lcg) -> Vec<f32> {
    let (n_k, d_k) = (spec.n_head_k * spec.head_dim_k, spec.head_dim_k);
    let mut feed = lcg.values(n_feed(spec));
    for head in feed[..2 * n_k].chunks_exact_mut(d_k) {
        let length = head.iter().map(|x| x * x).sum::<f32>().sqrt();
        head.iter_mut().for_each(|x| *x /= length);
    }
    for x in &mut feed[spec.conv().n_channel..] {
        *x = 0.55 + 0.25 * *x;
    }
    feed
}

pub(super) fn delta_rule(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(31);
    for spec in rules() {
        let cell = Cell {
            recurrence: &Rule(&spec),
            n_state: spec.n_out() * spec.head_dim_k,
            n_feed: n_feed(&spec),
        };
        let sequences: Vec<_> = SPANS
            .iter()
            .map(|span| Sequence::new(&cell, *span, &mut lcg, &|lcg| delta_feed_of(&spec, lcg)))
            .collect();
        repeated(gpu, &|gpu| rule_once(gpu, &spec, &cell, &sequences))?;
    }
    Ok(())
}

fn rule_once(
    gpu: &mut Checker<'_>,
    spec: &DeltaSpec,
    cell: &Cell<'_>,
    sequences: &[Sequence],
) -> Result<(), String> {
    let rows = sequences.iter().flat_map(|s| s.rows(cell));
    let x: Vec<f32> = rows.copied().collect();
    let expected: Vec<f32> = sequences.iter().flat_map(|s| &s.out).copied().collect();
    let pages = Pages::new(gpu, cell, sequences);
    let (n_k, n_channel) = (spec.n_head_k * spec.head_dim_k, spec.conv().n_channel);
    let (n_rows, n_slots) = ((x.len() / cell.n_feed) as u32, sequences.len() as u32);
    let args = ScanArgs {
        n_rows,
        n_feed: cell.n_feed as u32,
        n_head: spec.n_head as u32,
        n_head_k: spec.n_head_k as u32,
        head_dim_k: spec.head_dim_k as u32,
        head_dim_v: spec.head_dim_v as u32,
        q: 0,
        k: n_k as u32,
        v: 2 * n_k as u32,
        beta: n_channel as u32,
        rate: (n_channel + spec.n_head) as u32,
        by_channel: spec.by_channel.into(),
        tiled: spec.tiled.into(),
        columns: columns(spec) as u32,
        state: BEFORE as u32,
        feeds: BEFORE as u32,
        n_slots,
        n_states: pages.n_states as u32,
    };
    let states = || Data::Made(pages.states);
    let data = [Data::F32(&x), Data::U32(&pages.slots), states(), Data::Out];
    let out = gpu.call(
        &DELTA_RULE,
        DType::F32,
        key_dim(spec.head_dim_k),
        &args,
        &data,
        &pages.all,
    )?;
    // A step's sums have terms whose magnitudes add up to a column's length, and errors of the steps
    // before shrink as the column does.
    let tolerance = (2 * spec.head_dim_k + 8) as f32 * EPS * 5.0 * 5.0;
    close("delta_rule", out.f32(0), &expected, |_| tolerance)?;
    pages.check_states(gpu, sequences, tolerance)?;
    let keep = KeepFeedsArgs {
        n_rows,
        n_feed: cell.n_feed as u32,
        feeds: BEFORE as u32,
        n_slots,
        n_states: pages.n_states as u32,
    };
    let data = [Data::F32(&x), Data::U32(&pages.slots), states()];
    gpu.call(&KEEP_FEEDS, DType::F32, 0, &keep, &data, &pages.all)?;
    pages.check_feeds(gpu, cell, sequences)
}

/// Variant of the kernels of states.
fn key_dim(n: usize) -> u32 {
    *KEY_DIMS.iter().find(|&&most| n <= most as usize).unwrap()
}

/// The scan of Mamba 2 by the scalar level. A token's inputs are those of the state, what goes into it
/// and out of it, `n_state` values by group, and time steps.
struct Scan {
    n_head: usize,
    n_group: usize,
    n_state: usize,
    width: usize,
    a: Vec<f32>,
    d: Vec<f32>,
}

impl Recurrence for Scan {
    fn n_parts(&self) -> usize {
        self.n_head
    }

    fn n_out(&self) -> usize {
        self.n_head * self.width
    }

    fn step(&self, arch: Arch, head: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (x, rest) = feed.split_at(self.n_head * self.width);
        let (b, rest) = rest.split_at(self.n_group * self.n_state);
        let (c, dt) = rest.split_at(self.n_group * self.n_state);
        let group = head / (self.n_head / self.n_group);
        let [b, c] = [b, c].map(|x| &x[group * self.n_state..][..self.n_state]);
        let (x, dt) = (&x[head * self.width..][..self.width], dt[head]);
        arch.ssm_step(state, b, c, (dt * self.a[head]).exp(), dt, x, out);
        for (out, x) in out.iter_mut().zip(x) {
            *out += self.d[head] * x;
        }
    }
}

pub(super) fn ssm_scan(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(34);
    for (n_head, n_group, n_state, width) in [(4, 2, 20, 24), (2, 1, 200, 16)] {
        let scan = Scan {
            n_head,
            n_group,
            n_state,
            width,
            a: lcg.values(n_head).iter().map(|a| -1.5 + 0.5 * a).collect(),
            d: lcg.values(n_head),
        };
        let n_channel = n_head * width + 2 * n_group * n_state;
        let cell = Cell {
            recurrence: &scan,
            n_state: n_head * width * n_state,
            n_feed: n_channel + n_head,
        };
        // Time steps with which rates are below 0.6.
        let feed = |lcg: &mut Lcg| {
            let mut feed = lcg.values(cell.n_feed);
            feed[n_channel..]
                .iter_mut()
                .for_each(|dt| *dt = 0.75 + 0.25 * *dt);
            feed
        };
        let sequences: Vec<_> = SPANS
            .iter()
            .map(|span| Sequence::new(&cell, *span, &mut lcg, &feed))
            .collect();
        repeated(gpu, &|gpu| scan_once(gpu, &scan, &cell, &sequences))?;
    }
    let (n_rows, n_head, n_in, n_feed) = (3, 70, 81, 75);
    let (input, dt_bias) = (lcg.values(n_rows * n_in), lcg.values(n_head));
    let input: Vec<f32> = input.iter().map(|x| 30.0 * x).collect();
    let x = lcg.values(n_rows * n_feed);
    let args = TimeStepsArgs {
        n_rows: n_rows as u32,
        n_in: n_in as u32,
        n_feed: n_feed as u32,
        n_head: n_head as u32,
    };
    let data = [Data::F32(&input), Data::F32(&dt_bias), Data::F32(&x)];
    let y = gpu.call(&TIME_STEPS, DType::F32, 0, &args, &data, &[])?;
    let mut expected = x.clone();
    for (e, input) in expected
        .chunks_exact_mut(n_feed)
        .zip(input.chunks_exact(n_in))
    {
        let to = e[n_feed - n_head..].iter_mut().zip(&input[n_in - n_head..]);
        to.zip(&dt_bias)
            .for_each(|((e, dt), bias)| *e = softplus(dt + bias));
    }
    let tolerance = |i: usize| 4.0 * FAST * expected[i].abs() + 1e-12;
    close("time_steps", y.f32(0), &expected, tolerance)
}

fn scan_once(
    gpu: &mut Checker<'_>,
    scan: &Scan,
    cell: &Cell<'_>,
    sequences: &[Sequence],
) -> Result<(), String> {
    let rows = sequences.iter().flat_map(|s| s.rows(cell));
    let x: Vec<f32> = rows.copied().collect();
    let expected: Vec<f32> = sequences.iter().flat_map(|s| &s.out).copied().collect();
    let pages = Pages::new(gpu, cell, sequences);
    let (n_inner, n_of_groups) = (scan.n_out(), scan.n_group * scan.n_state);
    let args = ScanArgs {
        n_rows: (x.len() / cell.n_feed) as u32,
        n_feed: cell.n_feed as u32,
        n_head: scan.n_head as u32,
        n_head_k: scan.n_group as u32,
        head_dim_k: scan.n_state as u32,
        head_dim_v: scan.width as u32,
        v: 0,
        k: n_inner as u32,
        q: (n_inner + n_of_groups) as u32,
        beta: (n_inner + 2 * n_of_groups) as u32,
        columns: scan.width as u32,
        state: BEFORE as u32,
        feeds: BEFORE as u32,
        n_slots: sequences.len() as u32,
        n_states: pages.n_states as u32,
        ..ScanArgs::default()
    };
    let data = [
        Data::F32(&x),
        Data::F32(&scan.a),
        Data::F32(&scan.d),
        Data::U32(&pages.slots),
        Data::Made(pages.states),
        Data::Out,
    ];
    let variant = key_dim(scan.n_state);
    let out = gpu.call(&SSM_SCAN, DType::F32, variant, &args, &data, &pages.all)?;
    // A value of the state is below 1 / (1 - 0.6), and so are its errors, in units of those of a step;
    // an exponential errs by some units. The sum that is given has `n_state` terms.
    let of_state = (8.0 * EPS + 2.0 * FAST) * 2.5 * 2.5;
    pages.check_states(gpu, sequences, of_state)?;
    let tolerance = scan.n_state as f32 * (of_state + scan.n_state as f32 * 2.5 * EPS);
    close("ssm_scan", out.f32(0), &expected, |_| tolerance)
}

/// The scan of Mamba 1 by the scalar level: blocks of channels one after the other.
struct ChannelScan {
    n_channel: usize,
    n_state: usize,
    n_block: usize,
    a: Vec<f32>,
    d: Vec<f32>,
}

impl Recurrence for ChannelScan {
    fn n_parts(&self) -> usize {
        self.n_channel / self.n_block
    }

    fn n_out(&self) -> usize {
        self.n_channel
    }

    fn step(&self, arch: Arch, part: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (x, rest) = feed.split_at(self.n_channel);
        let (dt, rest) = rest.split_at(self.n_channel);
        let (b, c) = rest.split_at(self.n_state);
        let channels = part * self.n_block..(part + 1) * self.n_block;
        let a = &self.a[channels.start * self.n_state..channels.end * self.n_state];
        let [x, dt, d] = [x, dt, &self.d].map(|all| &all[channels.clone()]);
        arch.ssm_step_by_state(state, a, b, c, dt, x, out);
        for ((out, x), d) in out.iter_mut().zip(x).zip(d) {
            *out += d * x;
        }
    }
}

pub(super) fn channel_scan(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(36);
    for (n_channel, n_state, n_block) in [(70, 16, 2), (64, 5, 64)] {
        let scan = ChannelScan {
            n_channel,
            n_state,
            n_block,
            a: lcg
                .values(n_channel * n_state)
                .iter()
                .map(|a| -1.5 + 0.5 * a)
                .collect(),
            d: lcg.values(n_channel),
        };
        let cell = Cell {
            recurrence: &scan,
            n_state: n_channel * n_state,
            n_feed: 2 * (n_channel + n_state),
        };
        // Time steps with which rates are below 0.6.
        let feed = |lcg: &mut Lcg| {
            let mut feed = lcg.values(cell.n_feed);
            let steps = feed[n_channel..2 * n_channel].iter_mut();
            steps.for_each(|dt| *dt = 0.75 + 0.25 * *dt);
            feed
        };
        let sequences: Vec<_> = SPANS
            .iter()
            .map(|span| Sequence::new(&cell, *span, &mut lcg, &feed))
            .collect();
        repeated(gpu, &|gpu| channels_once(gpu, &scan, &cell, &sequences))?;
    }
    Ok(())
}

fn channels_once(
    gpu: &mut Checker<'_>,
    scan: &ChannelScan,
    cell: &Cell<'_>,
    sequences: &[Sequence],
) -> Result<(), String> {
    let rows = sequences.iter().flat_map(|s| s.rows(cell));
    let x: Vec<f32> = rows.copied().collect();
    let expected: Vec<f32> = sequences.iter().flat_map(|s| &s.out).copied().collect();
    let pages = Pages::new(gpu, cell, sequences);
    let args = ChannelScanArgs {
        n_rows: (x.len() / cell.n_feed) as u32,
        n_channel: scan.n_channel as u32,
        n_state: scan.n_state as u32,
        n_block: scan.n_block as u32,
        state: BEFORE as u32,
        feeds: BEFORE as u32,
        n_slots: sequences.len() as u32,
        n_states: pages.n_states as u32,
    };
    let data = [
        Data::F32(&x),
        Data::F32(&scan.a),
        Data::F32(&scan.d),
        Data::U32(&pages.slots),
        Data::Made(pages.states),
        Data::Out,
    ];
    let out = gpu.call(&CHANNEL_SCAN, DType::F32, 0, &args, &data, &pages.all)?;
    // As of `ssm_scan`.
    let of_state = (8.0 * EPS + 2.0 * FAST) * 2.5 * 2.5;
    pages.check_states(gpu, sequences, of_state)?;
    let tolerance = scan.n_state as f32 * (of_state + scan.n_state as f32 * 2.5 * EPS);
    close("channel_scan", out.f32(0), &expected, |_| tolerance)
}

pub(super) fn gated_groups(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(35);
    for (n, n_group, n_rows, has_norm) in [(300, 2, 3, true), (64, 1, 2, false)] {
        let (width, n_in) = (n * n_group, n * n_group + 9);
        let x = lcg.values(n_rows * width);
        let gate: Vec<f32> = lcg.values(n_rows * n_in).iter().map(|x| 6.0 * x).collect();
        let w = if has_norm {
            lcg.values(width)
        } else {
            Vec::new()
        };
        let args = GatedGroupsArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            n_group: n_group as u32,
            n_in: n_in as u32,
            n_norm: w.len() as u32,
            eps: 0.05,
        };
        let data = [Data::F32(&x), Data::F32(&gate), Data::F32(&w)];
        let y = gpu.call(&GATED_GROUPS, DType::F32, 0, &args, &data, &[])?;
        let mut expected = x.clone();
        for (row, e) in expected.chunks_exact_mut(width).enumerate() {
            let gates = &gate[row * n_in..][..width];
            e.iter_mut()
                .zip(gates)
                .for_each(|(e, gate)| *e *= gate * sigmoid(*gate));
            for (group, e) in e.chunks_exact_mut(n).enumerate().filter(|_| has_norm) {
                let gated = e.to_vec();
                Arch::scalar().rms_norm(e, &gated, &w[group * n..][..n], args.eps);
            }
        }
        // As of norms, of values up to 6.
        let tolerance = ((2 * n) as f32 * EPS + 4.0 * FAST) * (n as f32).sqrt() * 6.0;
        close("gated_groups", y.f32(0), &expected, |_| tolerance)?;
    }
    Ok(())
}

pub(super) fn delta_feed(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(32);
    for (spec, fused, bound) in rules()
        .into_iter()
        .zip([
            (true, None),
            (false, None),
            (false, Some(-5.0)),
            (true, None),
        ])
        .map(|(spec, (fused, bound))| (spec, fused, bound))
    {
        let (n_rows, n_head, n_rate) = (3, spec.n_head, spec.n_rate());
        let (width, d_k, eps) = (n_feed(&spec), spec.head_dim_k, 0.01f32);
        let x = lcg.values(n_rows * width);
        // Far beyond where exponentials are 0, too.
        let wide = |lcg: &mut Lcg, n: usize| -> Vec<f32> {
            (0..n)
                .map(|i| lcg.signed() * if i % 5 == 0 { 100.0 } else { 4.0 })
                .collect()
        };
        let (beta, rate) = (
            wide(&mut lcg, n_rows * n_head),
            wide(&mut lcg, n_rows * n_rate),
        );
        let a: Vec<f32> = lcg.values(n_head).iter().map(|a| -a.abs()).collect();
        let dt_bias = lcg.values(n_rate);
        let args = DeltaFeedArgs {
            n_rows: n_rows as u32,
            n_feed: width as u32,
            n_head: n_head as u32,
            n_head_k: spec.n_head_k as u32,
            head_dim_k: d_k as u32,
            n_rate: n_rate as u32,
            fused: fused.into(),
            bound: bound.unwrap_or(0.0),
            length_eps: eps,
        };
        let shared_by = n_head / spec.n_head_k;
        let of_both = beta.chunks(shared_by).zip(rate.chunks(shared_by));
        let both: Vec<f32> = of_both
            .flat_map(|(beta, rate)| [beta, rate].concat())
            .collect();
        let products = if fused {
            [&both, &both]
        } else {
            [&beta, &rate]
        };
        let data = [
            Data::F32(&x),
            Data::F32(products[0]),
            Data::F32(products[1]),
            Data::F32(&a),
            Data::F32(&dt_bias),
        ];
        let y = gpu.call(&DELTA_FEED, DType::F32, 0, &args, &data, &[])?;
        let mut expected = x.clone();
        for (row, e) in expected.chunks_exact_mut(width).enumerate() {
            let n_k = spec.n_head_k * d_k;
            for (i, head) in e[..2 * n_k].chunks_exact_mut(d_k).enumerate() {
                let length = (head.iter().map(|x| x * x).sum::<f32>() + eps).sqrt();
                let scale = if i < spec.n_head_k {
                    (d_k as f32).sqrt()
                } else {
                    1.0
                };
                head.iter_mut().for_each(|x| *x /= length * scale);
            }
            let (strengths, rates) = e[spec.conv().n_channel..].split_at_mut(n_head);
            for (i, to) in strengths.iter_mut().enumerate() {
                *to = sigmoid(beta[row * n_head + i]);
            }
            for (i, to) in rates.iter_mut().enumerate() {
                let (a, x) = (a[i * n_head / n_rate], rate[row * n_rate + i] + dt_bias[i]);
                *to = match bound {
                    Some(bound) => (bound * sigmoid(a * x)).exp(),
                    None => (a * softplus(x)).exp(),
                };
            }
        }
        // Lengths are above 0.1, and so is no value above 10; the exponents of what is not near 0 are
        // below 20 and have an error of some units of their size.
        let tolerance = (2 * d_k) as f32 * EPS + 20.0 * FAST;
        close("delta_feed", y.f32(0), &expected, |_| tolerance)?;
    }
    Ok(())
}

pub(super) fn gated_norm_heads(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(33);
    for (n, n_rows, is_sigmoid) in [(64, 5, false), (20, 3, true), (200, 1, false)] {
        let (x, w) = (lcg.values(n_rows * n), lcg.values(n));
        let gate: Vec<f32> = lcg.values(n_rows * n).iter().map(|x| 6.0 * x).collect();
        let args = GatedNormArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            eps: 0.05,
            sigmoid: u32::from(is_sigmoid),
        };
        let data = [Data::F32(&x), Data::F32(&gate), Data::F32(&w)];
        let y = gpu.call(&GATED_NORM_HEADS, DType::F32, 0, &args, &data, &[])?;
        let mut expected = vec![0.0; x.len()];
        for (e, x) in expected.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
            Arch::scalar().rms_norm(e, x, &w, args.eps);
        }
        for (e, gate) in expected.iter_mut().zip(&gate) {
            *e *= sigmoid(*gate) * if is_sigmoid { 1.0 } else { *gate };
        }
        // As of norms, whose values are at most √n, times gates of up to 6.
        let tolerance = ((2 * n) as f32 * EPS + 2.0 * FAST) * (n as f32).sqrt() * 6.0;
        close("gated_norm_heads", y.f32(0), &expected, |_| tolerance)?;
    }
    Ok(())
}
