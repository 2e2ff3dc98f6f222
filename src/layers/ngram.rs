//! Embeddings of several adjacent tokens, and what a layer makes of them: a value for each residual
//! stream, as strong as the stream asks for, and a convolution of values.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::{Product, RowAdapters};
use crate::kv::CellShape;
use crate::layers::activation::sigmoid;
use crate::layers::context::Context;
use crate::layers::conv::{parts_of, silu};
use crate::layers::hparams::Hparams;
use crate::layers::ngram::spec::NgramSpec;
use crate::layers::ngram::weights::Ngrams;
use crate::layers::norm::norm_streams;
use crate::layers::recurrence::{Mixing, Recurrence};
use crate::layers::rows::Rows;

/// Most tokens of an embedding.
pub(crate) const MAX_GRAM: usize = 16;
/// Least magnitude of which a root is taken.
const MIN_SCORE: f32 = 1e-6;

/// What its recurrences keep: the last tokens, and the last values of all streams.
pub(crate) fn cells(h: &Hparams, spec: &NgramSpec) -> [CellShape; 2] {
    let n = h.hyper.map_or(0, |hyper| hyper.n_stream * h.n_embd);
    [
        CellShape {
            n_state: spec.n_gram - 1,
            n_feed: 1,
        },
        CellShape {
            n_state: n.saturating_mul((spec.n_tap - 1) * spec.n_gram),
            n_feed: n,
        },
    ]
}

/// Buffers for `m` rows, of `n` values of all streams.
pub(crate) struct NgramBuffers<'a> {
    /// `(m, 1)`, `(m, n_gram)` twice.
    feed: &'a mut [f32],
    windows: &'a mut [f32],
    room: &'a mut [f32],
    /// Embeddings, `(m, n_ngram_embd)`, and values, `(m, n_embd)`.
    embd: &'a mut [f32],
    value: &'a mut [f32],
    /// Keys, values of streams, the same normed, the convolution, and its room: `(m, n)` each.
    keys: &'a mut [f32],
    values: &'a mut [f32],
    normed: &'a mut [f32],
    convolved: &'a mut [f32],
    by_part: &'a mut [f32],
}

impl<'a> NgramBuffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> NgramBuffers<'a> {
        let (m, n_gram, n_embd) = h
            .ngrams
            .as_ref()
            .map_or((0, 0, 0), |spec| (m, spec.n_gram, spec.n_embd()));
        let n = h.hyper.map_or(0, |hyper| hyper.n_stream * h.n_embd);
        NgramBuffers {
            feed: frame.take(m),
            windows: frame.take(m * n_gram),
            room: frame.take(m * n_gram),
            embd: frame.take(m * n_embd),
            value: frame.take(m * h.n_embd),
            keys: frame.take(m * n),
            values: frame.take(m * n),
            normed: frame.take(m * n),
            convolved: frame.take(m * n),
            by_part: frame.take(m * n),
        }
    }

    /// Adds to the streams of all rows, `(m, n)`.
    pub(crate) fn add(
        &mut self,
        cx: &mut Context<'_, '_>,
        (spec, w): (&NgramSpec, &Ngrams),
        streams: &mut [f32],
    ) {
        self.embed(cx, spec, w);
        let (arch, threads, h) = (cx.arch, cx.threads, cx.h);
        let (n_embd, m) = (h.n_embd, self.feed.len());
        let n = streams.len() / m;
        let mut on = cx.of_all();
        on.ctx.adapters = RowAdapters::All(&[]);
        let products = &mut [
            Product::of(&w.key, self.keys, m),
            Product::of(&w.value, self.value, m),
        ];
        on.linear(self.embd, m, products);
        let (all, value) = (&*streams, &*self.value);
        let workers = threads.when(m > 1);
        workers.for_chunk_pairs(self.keys, n, self.values, n, |row, keys, values| {
            let value = &value[row * n_embd..][..n_embd];
            norm_streams(arch, h.norm_eps, &w.key_norm, keys, n_embd);
            // Queries are in the place of values until these are known.
            values.copy_from_slice(&all[row * n..][..n]);
            norm_streams(arch, h.norm_eps, &w.query_norm, values, n_embd);
            let of_stream = values
                .chunks_exact_mut(n_embd)
                .zip(keys.chunks_exact(n_embd));
            for (to, key) in of_stream {
                let score = arch.dot(key, to) / (n_embd as f32).sqrt();
                let root = score.abs().max(MIN_SCORE).sqrt();
                let gate = sigmoid(if score == 0.0 {
                    0.0
                } else {
                    root.copysign(score)
                });
                to.iter_mut().zip(value).for_each(|(to, x)| *to = gate * x);
            }
        });
        let values = &*self.values;
        workers.for_chunks(self.normed, n, |row, normed| {
            normed.copy_from_slice(&values[row * n..][..n]);
            norm_streams(arch, h.norm_eps, &w.conv_norm, normed, n_embd);
        });
        let conv = SpacedConv { spec, w, n };
        let mut mixing = Mixing {
            cx,
            first_values: &mut [],
        };
        mixing.recur(&conv, (self.normed, n), self.by_part, self.convolved);
        let convolved = &*self.convolved;
        workers.for_chunks(streams, n, |row, streams| {
            let terms = values[row * n..].iter().zip(&convolved[row * n..]);
            for (x, (value, conv)) in streams.iter_mut().zip(terms) {
                *x += value + conv;
            }
        });
    }

    /// Looks up the embeddings of all rows.
    fn embed(&mut self, cx: &mut Context<'_, '_>, spec: &NgramSpec, w: &Ngrams) {
        for slot in &*cx.slots {
            let rows = Rows::All.range(slot);
            for (feed, &token) in self.feed[rows].iter_mut().zip(slot.tokens) {
                // Vocabularies are small enough for `f32`; 0 is no token.
                *feed = (token + 1) as f32;
            }
        }
        let last = LastTokens { n: spec.n_gram };
        let mut mixing = Mixing {
            cx: &mut *cx,
            first_values: &mut [],
        };
        mixing.recur(&last, (self.feed, 1), self.room, self.windows);
        let (arch, gguf, n) = (cx.arch, cx.gguf, spec.n_row_embd);
        let windows = &*self.windows;
        let workers = cx.threads.when(self.feed.len() > 1);
        workers.for_chunks(self.embd, spec.n_embd(), |row, embd| {
            let mut window = [0; MAX_GRAM];
            let window = &mut window[..spec.n_gram];
            let mut is_past = false;
            for (i, token) in windows[row * spec.n_gram..][..spec.n_gram]
                .iter()
                .enumerate()
            {
                let token = (*token as u64).checked_sub(1);
                is_past |= i > 0 && token.is_none_or(|token| token == u64::from(spec.eos));
                let seen = token.filter(|_| !is_past);
                window[i] = seen.unwrap_or(spec.eos.into());
            }
            for (i, embd) in embd.chunks_exact_mut(n).enumerate() {
                let row = spec.row(i, window);
                arch.dequantize(
                    w.table.dtype,
                    w.table.data_of_rows(gguf, row..row + 1),
                    embd,
                );
            }
        });
    }
}

/// The last tokens, the newest first.
struct LastTokens {
    n: usize,
}

impl Recurrence for LastTokens {
    fn n_parts(&self) -> usize {
        1
    }

    fn n_out(&self) -> usize {
        self.n
    }

    fn step(&self, _: Arch, _: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        out[0] = feed[0];
        out[1..].copy_from_slice(state);
        state.copy_from_slice(&out[..self.n - 1]);
    }
}

/// A convolution of each channel whose tokens are `n_gram` apart, then `x/(1 + e⁻ˣ)`.
struct SpacedConv<'a> {
    spec: &'a NgramSpec,
    w: &'a Ngrams,
    /// Channels.
    n: usize,
}

impl Recurrence for SpacedConv<'_> {
    fn n_parts(&self) -> usize {
        parts_of(self.n)
    }

    fn n_out(&self) -> usize {
        self.n
    }

    fn step(&self, _: Arch, part: usize, past: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (n, NgramSpec { n_gram, n_tap, .. }) = (out.len(), self.spec);
        let x = &feed[part * n..][..n];
        for (d, out) in out.iter_mut().enumerate() {
            let taps = &self.w.taps[(part * n + d) * n_tap..][..*n_tap];
            let (last, earlier) = taps.split_last().expect("taps");
            // Rows of the past are those of single tokens, the oldest first.
            let terms = earlier.iter().enumerate();
            let sum: f32 = terms.map(|(k, tap)| tap * past[k * n_gram * n + d]).sum();
            *out = silu(sum + last * x[d]);
        }
        let kept = past.len() - n;
        past.copy_within(n.., 0);
        past[kept..].copy_from_slice(x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_of_so_many_tokens() {
        let spec = NgramSpec {
            n_gram: 3,
            n_tap: 2,
            eos: 0,
            n_row_embd: 1,
            n_row: 100,
            multipliers: vec![3, 5, 7],
            hashes: vec![(10, 11), (30, 13)],
        };
        assert_eq!(spec.row(0, &[4, 6, 9]), 10 + ((12 ^ 30) % 11));
        assert_eq!(spec.row(1, &[4, 6, 9]), 30 + ((12 ^ 30 ^ 63) % 13));
    }
}
