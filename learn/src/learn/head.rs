//! The adapter after the final norm: `h' = h + s·B·(A·h)`, so logits change by `s·(W·B)·(A·h)`.
//!
//! It comes after everything that the key/value cache depends on, so caches stay valid while it
//! learns. With `W·B` stored, base and adapted logits come from one product with the head.

use crate::learn::moments::{NO_TOKEN, SLOTS, Sample};
use ruvllm::arch::Arch;
use ruvllm::model::LogitTransform;

/// Largest rank of a head adapter.
pub const MAX_RANK: usize = 4;

/// One value per rank; those beyond the adapter's rank are zero.
pub(crate) type Ranks = [f32; MAX_RANK];

/// Largest number of values in those rows of the head that contribute to a gradient one by one,
/// which takes most of the time of an update; the other rows contribute through their mean.
const ROW_VALUES: usize = 1 << 19;

/// Statistics of the rows of the head `W: (n_vocab, n_embd)`.
#[derive(Clone, Debug)]
pub(crate) struct HeadRows {
    /// Their mean.
    pub(crate) mean: Vec<f32>,
    /// `max ‖W_v − mean‖`.
    pub(crate) spread: f32,
}

/// A low-rank change of the hidden state that the output head reads.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) rank: usize,
    n_embd: usize,
    /// `A: (rank, n_embd)`; all zero until directions have been chosen.
    pub(crate) a: Vec<f32>,
    /// `Bᵀ: (rank, n_embd)`.
    pub(crate) b: Vec<f32>,
    /// `(W·B)ᵀ: (rank, n_vocab)`.
    pub(crate) wb: Vec<f32>,
    /// Strength `s`.
    pub(crate) scale: f32,
    /// Mean and covariance of the rows of `W·B`, for tokens that a moment does not list.
    mean: Ranks,
    covariance: [Ranks; MAX_RANK],
}

/// `∂L/∂B` as factors of rows of the head: `Σ_v W_v·rows[v]ᵀ + mean·restᵀ`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gradient {
    pub(crate) rows: Vec<(u32, Ranks)>,
    pub(crate) rest: Ranks,
    /// Upper bound of the norm of the part that truncation left out, `‖∂L/∂B − truncated‖_F`.
    pub(crate) error_bound: f64,
    /// Mean loss of the moments.
    pub(crate) loss: f64,
}

/// A distribution over the slots of a moment and the remaining tokens.
#[derive(Clone, Debug)]
pub(crate) struct Adapted {
    /// Natural logarithms; `−∞` for empty slots.
    pub(crate) log_p: [f32; SLOTS],
    /// `∂logit/∂raw` of each slot.
    pub(crate) slope: [f32; SLOTS],
    pub(crate) log_rest: f32,
}

impl Head {
    pub(crate) fn new(rank: usize, n_embd: usize, n_vocab: usize) -> Head {
        Head {
            rank,
            n_embd,
            a: vec![0.0; rank * n_embd],
            b: vec![0.0; rank * n_embd],
            wb: vec![0.0; rank * n_vocab],
            scale: 0.0,
            mean: [0.0; MAX_RANK],
            covariance: [[0.0; MAX_RANK]; MAX_RANK],
        }
    }

    pub(crate) fn n_vocab(&self) -> usize {
        self.wb.len() / self.rank
    }

    /// Whether the adapter changes nothing.
    pub(crate) fn is_idle(&self) -> bool {
        self.scale == 0.0
    }

    /// `A·h`.
    pub(crate) fn project(&self, arch: Arch, h: &[f32]) -> Ranks {
        let mut z = [0.0; MAX_RANK];
        for (z, a) in z.iter_mut().zip(self.a.chunks_exact(self.n_embd)) {
            *z = arch.dot(a, h);
        }
        z
    }

    /// Adds `s·(W·B)·(A·h)` to the head's product.
    pub(crate) fn add(&self, arch: Arch, h: &[f32], raw: &mut [f32]) {
        let z = self.project(arch, h);
        for (z, wb) in z.iter().zip(self.wb.chunks_exact(raw.len())) {
            arch.add_scaled(raw, wb, self.scale * z);
        }
    }

    /// Updates mean and covariance; to be called after `wb` has changed.
    pub(crate) fn measure(&mut self) {
        let n = self.n_vocab() as f64;
        let columns: Vec<&[f32]> = self.wb.chunks_exact(self.n_vocab()).collect();
        let mean_of = |x: &mut dyn Iterator<Item = f32>| (x.map(f64::from).sum::<f64>() / n) as f32;
        for (i, x) in columns.iter().enumerate() {
            self.mean[i] = mean_of(&mut x.iter().copied());
        }
        for (i, x) in columns.iter().enumerate() {
            for (j, y) in columns.iter().enumerate() {
                let product = mean_of(&mut x.iter().zip(*y).map(|(x, y)| x * y));
                self.covariance[i][j] = product - self.mean[i] * self.mean[j];
            }
        }
    }

    pub(crate) fn adapted(
        &self,
        transform: LogitTransform,
        m: &Sample<'_>,
        z: &Ranks,
        scale: f32,
    ) -> Adapted {
        let n_vocab = self.n_vocab();
        let mut out = Adapted {
            log_p: [f32::NEG_INFINITY; SLOTS],
            slope: [0.0; SLOTS],
            log_rest: 0.0,
        };
        let mut max = f32::NEG_INFINITY;
        for i in 0..SLOTS {
            if m.ids[i] == NO_TOKEN {
                break;
            }
            let mut change = 0.0;
            for r in 0..self.rank {
                change += z[r] * self.wb[r * n_vocab + m.ids[i] as usize];
            }
            let logit = transform.logit(m.raw[i] + scale * change);
            out.log_p[i] = logit;
            out.slope[i] = transform.slope(logit);
            max = max.max(logit);
        }
        // Over unlisted tokens the change is assumed to be normally distributed: ln E exp(x) = mean
        // + variance/2.
        let step = scale * transform.scale;
        out.log_rest = m.rest + step * dot(z, &self.mean) + 0.5 * step * step * self.variance(z);
        max = max.max(out.log_rest);
        let mut sum = (out.log_rest - max).exp();
        sum += out.log_p.iter().map(|l| (l - max).exp()).sum::<f32>();
        let lse = max + sum.ln();
        out.log_p.iter_mut().for_each(|l| *l -= lse);
        out.log_rest -= lse;
        out
    }

    /// Variance of the change of a logit over the vocabulary, for `s = 1`.
    fn variance(&self, z: &Ranks) -> f32 {
        let mut v = 0.0;
        for i in 0..self.rank {
            v += z[i] * dot(z, &self.covariance[i]);
        }
        v.max(0.0)
    }

    /// `−ln p` of the observed token.
    pub(crate) fn loss(
        &self,
        transform: LogitTransform,
        m: &Sample<'_>,
        z: &Ranks,
        scale: f32,
    ) -> f64 {
        -f64::from(self.adapted(transform, m, z, scale).log_p[0])
    }

    /// The base model's distribution at a moment.
    pub(crate) fn base(&self, transform: LogitTransform, m: &Sample<'_>) -> Adapted {
        self.adapted(transform, m, &[0.0; MAX_RANK], 0.0)
    }

    /// `KL(base ‖ adapted)` of a moment, and the rise of the observed token's loss.
    pub(crate) fn divergence(
        &self,
        transform: LogitTransform,
        m: &Sample<'_>,
        base: &Adapted,
        z: &Ranks,
        scale: f32,
    ) -> (f64, f64) {
        let adapted = self.adapted(transform, m, z, scale);
        let term = |p: f32, q: f32| {
            if p == f32::NEG_INFINITY {
                0.0
            } else {
                f64::from(p).exp() * f64::from(p - q)
            }
        };
        let listed: f64 = base
            .log_p
            .iter()
            .zip(&adapted.log_p)
            .map(|(&p, &q)| term(p, q))
            .sum();
        // Over unlisted tokens, a normally distributed change of variance v diverges by v/2.
        let step = scale * transform.scale;
        let inside =
            f64::from(base.log_rest).exp() * f64::from(0.5 * step * step * self.variance(z));
        let rise = f64::from(base.log_p[0] - adapted.log_p[0]);
        (
            listed + term(base.log_rest, adapted.log_rest) + inside,
            rise,
        )
    }

    /// Confidence gradient: minus the derivative of the summed entropies of `moments` with respect
    /// to `s·B`, at `s = 0`, as factors of the head's rows. `z` holds `A·h` of each moment.
    pub(crate) fn confidence<'a>(
        &self,
        transform: LogitTransform,
        moments: impl Iterator<Item = (Sample<'a>, Ranks)>,
        slots: &mut Slots,
    ) -> Gradient {
        slots.begin(self.n_vocab());
        let mut g = Gradient::default();
        for (m, z) in moments {
            let p = self.base(transform, &m);
            let n = m.ids.iter().take_while(|&&id| id != NO_TOKEN).count();
            // The remaining probability is assumed to be spread evenly.
            let each = p.log_rest - ((self.n_vocab() - n).max(1) as f32).ln();
            let term = |l: f32| l.exp() * l;
            let mean = p.log_p[..n].iter().map(|&l| term(l)).sum::<f32>() + p.log_rest.exp() * each;
            for i in 0..n {
                let weight = p.log_p[i].exp() * (p.log_p[i] - mean) * p.slope[i];
                let u = slots.at(m.ids[i]);
                (0..MAX_RANK).for_each(|r| u[r] += weight * z[r]);
            }
            let weight = p.log_rest.exp() * (each - mean) * transform.scale;
            (0..MAX_RANK).for_each(|r| g.rest[r] += weight * z[r]);
        }
        g.rows = slots.taken();
        g.rows.sort_unstable_by_key(|row| row.0);
        g
    }

    /// Covariance, summed over tokens, between the changes of logits and the observed token: `Σ_t
    /// δ_t(y_t) − δ_t(y_u)`, averaged over all `u`, for `s = 1`.
    pub(crate) fn pairing(&self, tokens: &[usize], z: &[Ranks]) -> f64 {
        let mut sum = 0.0;
        for (r, wb) in self.wb.chunks_exact(self.n_vocab()).enumerate() {
            let mean =
                tokens.iter().map(|&y| f64::from(wb[y])).sum::<f64>() / tokens.len().max(1) as f64;
            sum += tokens
                .iter()
                .zip(z)
                .map(|(&y, z)| f64::from(z[r]) * (f64::from(wb[y]) - mean))
                .sum::<f64>();
        }
        sum
    }

    /// Gradient of `Σ weight·(−ln p)` over `moments` at the current scale, with respect to `s·B`,
    /// as factors of the listed tokens' rows. `z` holds `A·h` of each moment.
    pub(crate) fn gradient<'a>(
        &self,
        transform: LogitTransform,
        rows: &HeadRows,
        moments: impl Iterator<Item = (Sample<'a>, Ranks, f32)>,
        slots: &mut Slots,
    ) -> Gradient {
        slots.begin(self.n_vocab());
        let mut g = Gradient::default();
        let mut n = 0;
        for (m, z, weight) in moments {
            let q = self.adapted(transform, &m, &z, self.scale);
            g.loss += f64::from(-q.log_p[0]);
            n += 1;
            for i in 0..SLOTS {
                if m.ids[i] == NO_TOKEN {
                    break;
                }
                let error =
                    weight * (q.log_p[i].exp() - if i == 0 { 1.0 } else { 0.0 }) * q.slope[i];
                let u = slots.at(m.ids[i]);
                (0..MAX_RANK).for_each(|r| u[r] += error * z[r]);
            }
            let error = weight * q.log_rest.exp() * transform.scale;
            (0..MAX_RANK).for_each(|r| g.rest[r] += error * z[r]);
            g.error_bound += f64::from(error.abs() * norm(&z) * rows.spread);
        }
        g.loss /= f64::from(n.max(1));
        g.rows = slots.taken();
        let max_rows = (ROW_VALUES / self.n_embd).max(SLOTS);
        if g.rows.len() > max_rows {
            g.rows.select_nth_unstable_by(max_rows, |x, y| {
                norm(&y.1).total_cmp(&norm(&x.1)).then(x.0.cmp(&y.0))
            });
            for (_, u) in g.rows.drain(max_rows..) {
                (0..MAX_RANK).for_each(|r| g.rest[r] += u[r]);
                g.error_bound += f64::from(norm(&u) * rows.spread);
            }
        }
        // A fixed order makes sums reproducible.
        g.rows.sort_unstable_by_key(|row| row.0);
        g
    }
}

/// Sums per token of a vocabulary, which are reset in constant time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots {
    /// Per token: the round in which it was last used, and the index of its sum.
    places: Vec<(u32, u32)>,
    round: u32,
    used: Vec<(u32, Ranks)>,
}

impl Slots {
    fn begin(&mut self, n_vocab: usize) {
        self.places.resize(n_vocab, (0, 0));
        self.round = self.round.wrapping_add(1);
        if self.round == 0 {
            self.places.fill((0, 0));
            self.round = 1;
        }
        self.used.clear();
    }

    fn at(&mut self, token: u32) -> &mut Ranks {
        let place = &mut self.places[token as usize];
        if place.0 != self.round {
            *place = (self.round, self.used.len() as u32);
            self.used.push((token, [0.0; MAX_RANK]));
        }
        &mut self.used[place.1 as usize].1
    }

    fn taken(&mut self) -> Vec<(u32, Ranks)> {
        std::mem::take(&mut self.used)
    }
}

fn dot(x: &Ranks, y: &Ranks) -> f32 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn norm(x: &Ranks) -> f32 {
    dot(x, x).sqrt()
}
