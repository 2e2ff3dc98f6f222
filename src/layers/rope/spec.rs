//! Rotary position embeddings of a model.

/// Order of the pairs of dimensions that are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeOrder {
    /// Neighbours: `(0, 1), (2, 3), …`
    Norm,
    /// Halves: `(0, n/2), (1, n/2 + 1), …`
    NeoX,
}

/// How rotation frequencies are stretched beyond the trained context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all (or by the factors of the tensor `rope_freqs.weight`, as llama 3 does).
    None,
    /// All by the same factor (arXiv 2306.15595).
    Linear {
        /// Positions are divided by this.
        factor: f32,
    },
    /// Low frequencies interpolated, high ones kept (arXiv 2309.00071).
    Yarn {
        /// Positions are divided by this where frequencies are low.
        factor: f32,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f32,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f32,
        /// Whether these bounds are rounded to whole dimensions.
        truncate: bool,
    },
    /// The base grows, so that the lowest frequency is interpolated and high ones are kept
    /// (NTK-aware; bloc97 on r/LocalLLaMA, June 2023).
    Ntk {
        /// How much longer the context becomes.
        factor: f32,
    },
    /// The same, by how much the context of a session is longer than the original one (Hugging
    /// Face's `dynamic`); shorter ones are not stretched.
    Dynamic {
        /// Factor on that length.
        factor: f32,
    },
    /// Factors per dimension from the file, one set for short and one for long contexts (arXiv
    /// 2402.13753). Phi 3 files have the factors without naming this scaling; they are used all
    /// the same.
    Long,
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Which dimensions form a pair.
    pub order: RopeOrder,
    /// Dimensions rotated; the rest of the head stays.
    pub n_dims: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// Scaling beyond the trained context.
    pub scaling: RopeScaling,
    /// Context the frequencies were trained for.
    pub n_ctx_orig: usize,
    /// Factor on the rotated values.
    pub attn_factor: f32,
    /// Whether the divisors in the file (`rope_freqs.weight`) apply.
    pub factors: bool,
    /// Whether YaRN multiplies rotated values by `1 + ln(factor)/10` in addition.
    pub yarn_magnitude: bool,
    /// Pairs that turn by the row or column of an image (M-RoPE, arXiv 2409.12191).
    pub sections: Option<RopeSections>,
}

/// Pairs of dimensions by axis: time, row, column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeSections {
    /// Number of pairs of each.
    pub n: [usize; 3],
    /// Whether the axes take turns, beginning with time; otherwise they follow each other.
    pub interleaved: bool,
}

impl RopeSections {
    /// The axis of a pair: 0 for time, 1 for the row, 2 for the column.
    pub(crate) fn axis(self, pair: usize) -> usize {
        let [time, row, column] = self.n;
        if self.interleaved {
            let axis = pair % 3;
            return if pair < 3 * self.n[axis] { axis } else { 0 };
        }
        // Behind the last section they begin anew.
        match pair % (time + row + column).max(1) {
            pair if pair < time => 0,
            pair if pair < time + row => 1,
            _ => 2,
        }
    }
}

impl Rope {
    /// Base of the frequencies in a context of `n_ctx` tokens.
    fn base(&self, n_ctx: usize) -> f32 {
        let stretch = match self.scaling {
            RopeScaling::Ntk { factor } => factor,
            RopeScaling::Dynamic { factor } if n_ctx > self.n_ctx_orig => {
                factor * n_ctx as f32 / self.n_ctx_orig as f32 - (factor - 1.0)
            }
            _ => return self.theta,
        };
        let n = self.n_dims as f32;
        self.theta * stretch.powf(n / (n - 2.0))
    }

    /// Frequencies of the pairs in a context of `n_ctx` tokens, and the factor on cosines and sines;
    /// `factors` are divisors of the frequencies.
    pub(crate) fn frequencies(&self, factors: Option<&[f32]>, n_ctx: usize) -> (Vec<f32>, f32) {
        let (theta, scaling) = (self.base(n_ctx), self.scaling);
        let n = self.n_dims as f32;
        let base = |i: usize| theta.powf(-2.0 * i as f32 / n);
        let divide = |i: usize, f: f32| f / factors.map_or(1.0, |x| x[i]);
        let pairs = 0..self.n_dims / 2;
        match scaling {
            RopeScaling::None
            | RopeScaling::Long
            | RopeScaling::Ntk { .. }
            | RopeScaling::Dynamic { .. } => (
                pairs.map(|i| divide(i, base(i))).collect(),
                self.attn_factor,
            ),
            RopeScaling::Linear { factor } => (
                pairs.map(|i| divide(i, base(i) / factor)).collect(),
                self.attn_factor,
            ),
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
            } => {
                // Index of the pair that makes `beta` turns over the original context.
                let pair = |beta: f32| {
                    n * (self.n_ctx_orig as f32 / (beta * 2.0 * std::f32::consts::PI)).ln()
                        / (2.0 * theta.ln())
                };
                let (low, high) = (pair(beta_fast), pair(beta_slow));
                let (low, high) = if truncate {
                    (low.floor(), high.ceil())
                } else {
                    (low, high)
                };
                let (low, high) = (low.max(0.0), high.min(n - 1.0));
                let frequencies = pairs.map(|i| {
                    let kept = 1.0 - ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    divide(i, base(i) * (kept + (1.0 - kept) / factor))
                });
                let magnitude = if self.yarn_magnitude {
                    1.0 + 0.1 * factor.ln()
                } else {
                    1.0
                };
                (frequencies.collect(), self.attn_factor * magnitude)
            }
        }
    }
}

/// Index of a rope in [`Hparams::ropes`](crate::layers::hparams::Hparams::ropes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeId(pub(crate) usize);

impl RopeId {
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formula of Hugging Face's `_compute_dynamic_ntk_parameters` for 16 dimensions, base 10000,
    /// factor 4 and 512 positions, in contexts of 300, 512 and 2000 tokens; in one of 896 tokens it is
    /// NTK-aware scaling by 4.
    #[test]
    fn bases_grow_with_the_context() {
        let rope = |scaling: RopeScaling| Rope {
            sections: None,
            order: RopeOrder::NeoX,
            n_dims: 16,
            theta: 10000.0,
            scaling,
            n_ctx_orig: 512,
            attn_factor: 1.0,
            factors: false,
            yarn_magnitude: true,
        };
        let check = |scaling: RopeScaling, n_ctx: usize, base: f64| {
            let (ours, factor) = rope(scaling).frequencies(None, n_ctx);
            assert_eq!((ours.len(), factor), (8, 1.0));
            for (i, ours) in ours.into_iter().enumerate() {
                let expected = base.powf(-2.0 * i as f64 / 16.0);
                let error = (f64::from(ours) / expected - 1.0).abs();
                assert!(error < 1e-5, "{scaling:?} {n_ctx} {i}: {ours} {expected}");
            }
        };
        let dynamic = RopeScaling::Dynamic { factor: 4.0 };
        check(dynamic, 300, 10000.0);
        check(dynamic, 512, 10000.0);
        check(dynamic, 2000, 10000.0 * 12.625f64.powf(16.0 / 14.0));
        let ntk = RopeScaling::Ntk { factor: 4.0 };
        check(ntk, 300, 10000.0 * 4f64.powf(16.0 / 14.0));
        check(dynamic, 896, 10000.0 * 4f64.powf(16.0 / 14.0));
    }
}
