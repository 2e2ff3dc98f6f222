//! Steps of recurrent layers: a head's state goes through one token.

use super::lanes::Lanes;
use crate::arch::gemm::prefetch_line;

/// Sums that do not wait for each other.
const SUMS: usize = 4;

/// See [`crate::arch::Arch::delta_rule`].
#[inline(always)]
pub(in crate::arch) fn delta_rule<V: Lanes>(
    z: V,
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    beta: f32,
    rate: &[f32],
    out: &mut [f32],
) {
    let d_v = v.len();
    assert!(state.len() == k.len() * d_v && q.len() == k.len() && out.len() == d_v);
    assert!(rate.len() == 1 || rate.len() == k.len());
    let mut c = 0;
    while c < d_v {
        let n = d_v - c;
        if n >= 2 * V::N {
            // SAFETY: that many columns are left.
            unsafe { delta_columns::<V, 2, true>(z, state, q, k, v, beta, rate, out, c, V::N) };
            c += 2 * V::N;
        } else if n >= V::N {
            // SAFETY: as above.
            unsafe { delta_columns::<V, 1, true>(z, state, q, k, v, beta, rate, out, c, V::N) };
            c += V::N;
        } else {
            // SAFETY: as above.
            unsafe { delta_columns::<V, 1, false>(z, state, q, k, v, beta, rate, out, c, n) };
            c = d_v;
        }
    }
}

/// `C` vectors of columns from `c` on; unless `WHOLE`, the only one has `n` lanes.
///
/// # Safety
/// `v` must have these columns, and the lengths must be those of [`delta_rule`].
#[inline(always)]
unsafe fn delta_columns<V: Lanes, const C: usize, const WHOLE: bool>(
    z: V,
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    beta: f32,
    rate: &[f32],
    out: &mut [f32],
    c: usize,
    n: usize,
) {
    let (d_k, d_v) = (k.len(), v.len());
    let read = |p: *const f32| {
        // SAFETY: the caller's promise.
        unsafe { if WHOLE { z.read(p) } else { z.read_first(p, n) } }
    };
    let write = |x: V, p: *mut f32| {
        // SAFETY: the caller's promise.
        unsafe {
            if WHOLE {
                x.write(p)
            } else {
                x.write_first(p, n)
            }
        }
    };
    let state = state.as_mut_ptr().wrapping_add(c);
    let rate_of = |i: usize| if rate.len() == 1 { rate[0] } else { rate[i] };
    let mut sums = [[z; C]; SUMS];
    for first in (0..d_k).step_by(SUMS) {
        for s in 0..SUMS {
            let i = first + s;
            if i < d_k {
                let weight = z.splat(rate_of(i) * k[i]);
                for j in 0..C {
                    sums[s][j] =
                        weight.mul_add(read(state.wrapping_add(i * d_v + j * V::N)), sums[s][j]);
                }
            }
        }
    }
    let mut change = [z; C];
    for j in 0..C {
        let said = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
        change[j] = z.splat(beta) * (read(v.as_ptr().wrapping_add(c + j * V::N)) - said);
    }
    let mut sums = [[z; C]; SUMS];
    for first in (0..d_k).step_by(SUMS) {
        for s in 0..SUMS {
            let i = first + s;
            if i < d_k {
                let (rate, k, q) = (z.splat(rate_of(i)), z.splat(k[i]), z.splat(q[i]));
                for j in 0..C {
                    let at = state.wrapping_add(i * d_v + j * V::N);
                    let x = k.mul_add(change[j], rate * read(at));
                    write(x, at);
                    sums[s][j] = q.mul_add(x, sums[s][j]);
                }
            }
        }
    }
    for j in 0..C {
        let sum = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
        write(sum, out.as_mut_ptr().wrapping_add(c + j * V::N));
    }
}

/// Decay rates of a selective state space model, and its time steps.
#[derive(Clone, Copy)]
enum Rates<'a> {
    Shared {
        decay: f32,
        dt: f32,
    },
    /// States keep `exp(dt·a)`.
    ByState {
        a: &'a [f32],
        dt: &'a [f32],
    },
}

/// See [`crate::arch::Arch::ssm_step`].
#[inline(always)]
pub(in crate::arch) fn ssm_step<V: Lanes>(
    z: V,
    state: &mut [f32],
    b: &[f32],
    c: &[f32],
    decay: f32,
    dt: f32,
    x: &[f32],
    out: &mut [f32],
) {
    selective_scan(z, state, Rates::Shared { decay, dt }, b, c, x, out);
}

/// See [`crate::arch::Arch::ssm_step_by_state`].
#[inline(always)]
pub(in crate::arch) fn ssm_step_by_state<V: Lanes>(
    z: V,
    state: &mut [f32],
    a: &[f32],
    b: &[f32],
    c: &[f32],
    dt: &[f32],
    x: &[f32],
    out: &mut [f32],
) {
    assert!(dt.len() == x.len() && a.len() == state.len());
    selective_scan(z, state, Rates::ByState { a, dt }, b, c, x, out);
}

/// `state` is `(b.len(), x.len())`: lanes are channels.
#[inline(always)]
fn selective_scan<V: Lanes>(
    z: V,
    state: &mut [f32],
    rates: Rates<'_>,
    b: &[f32],
    c: &[f32],
    x: &[f32],
    out: &mut [f32],
) {
    let n = x.len();
    assert!(state.len() == b.len() * n && c.len() == b.len() && out.len() == n);
    let mut first = 0;
    while first < n {
        let left = n - first;
        if left >= SUMS * V::N {
            // SAFETY: so many channels are left, and all lengths were checked, here and by the
            // callers.
            unsafe { scan_channels::<V, SUMS, true>(z, state, rates, b, c, x, out, first, V::N) };
            first += SUMS * V::N;
        } else if left >= V::N {
            // SAFETY: as above.
            unsafe { scan_channels::<V, 1, true>(z, state, rates, b, c, x, out, first, V::N) };
            first += V::N;
        } else {
            // SAFETY: as above.
            unsafe { scan_channels::<V, 1, false>(z, state, rates, b, c, x, out, first, left) };
            first = n;
        }
    }
}

/// `C` vectors of channels from `first` on; unless `WHOLE`, the only one has `lanes` lanes.
///
/// # Safety
/// `x` must have these channels, and the lengths must be those of [`selective_scan`] and its
/// callers.
#[inline(always)]
unsafe fn scan_channels<V: Lanes, const C: usize, const WHOLE: bool>(
    z: V,
    state: &mut [f32],
    rates: Rates<'_>,
    b: &[f32],
    c: &[f32],
    x: &[f32],
    out: &mut [f32],
    first: usize,
    lanes: usize,
) {
    let read = |p: *const f32| {
        // SAFETY: the caller's promise.
        unsafe {
            if WHOLE {
                z.read(p)
            } else {
                z.read_first(p, lanes)
            }
        }
    };
    let write = |x: V, p: *mut f32| {
        // SAFETY: the caller's promise.
        unsafe {
            if WHOLE {
                x.write(p)
            } else {
                x.write_first(p, lanes)
            }
        }
    };
    let (mut u, mut exponents, mut sums) = ([z; C], [z; C], [z; C]);
    for j in 0..C {
        let at = first + j * V::N;
        let dt = match rates {
            Rates::Shared { dt, .. } => z.splat(dt),
            Rates::ByState { dt, .. } => read(dt.as_ptr().wrapping_add(at)),
        };
        u[j] = dt * read(x.as_ptr().wrapping_add(at));
        exponents[j] = dt * z.splat(std::f32::consts::LOG2_E);
    }
    for (i, (b, c)) in b.iter().zip(c).enumerate() {
        let (b, c) = (z.splat(*b), z.splat(*c));
        let decays = match rates {
            Rates::Shared { decay, .. } => [z.splat(decay); C],
            Rates::ByState { a, .. } => {
                let mut powers = [z; C];
                for j in 0..C {
                    let at = i * x.len() + first + j * V::N;
                    powers[j] = exponents[j] * read(a.as_ptr().wrapping_add(at));
                    // States of other channels follow; a block takes too long for the CPU to read
                    // ahead by itself.
                    prefetch_line(state.as_ptr().wrapping_add(2 * state.len() + at).cast());
                }
                super::lanes::exp2(z, powers)
            }
        };
        for j in 0..C {
            let at = state
                .as_mut_ptr()
                .wrapping_add(i * x.len() + first + j * V::N);
            let s = u[j].mul_add(b, decays[j] * read(at));
            write(s, at);
            sums[j] = s.mul_add(c, sums[j]);
        }
    }
    for j in 0..C {
        write(sums[j], out.as_mut_ptr().wrapping_add(first + j * V::N));
    }
}

/// See [`crate::arch::Arch::rwkv6_step`].
#[inline(always)]
pub(in crate::arch) fn rwkv6_step<V: Lanes>(
    z: V,
    state: &mut [f32],
    r: &[f32],
    k: &[f32],
    v: &[f32],
    w: &[f32],
    first: &[f32],
    out: &mut [f32],
) {
    let d_v = v.len();
    assert!(
        state.len() == k.len() * d_v
            && [r, w, first].iter().all(|x| x.len() == k.len())
            && out.len() == d_v
    );
    let bonus: f32 = r
        .iter()
        .zip(first)
        .zip(k)
        .map(|((r, first), k)| r * first * k)
        .sum();
    for c in (0..d_v).step_by(SUMS * V::N) {
        let columns = c..d_v.min(c + SUMS * V::N);
        let mut sums = [z; SUMS];
        for (i, row) in state.chunks_exact_mut(d_v).enumerate() {
            let (r, k, w) = (z.splat(r[i]), z.splat(k[i]), z.splat(w[i]));
            let parts = row[columns.clone()]
                .chunks_mut(V::N)
                .zip(v[columns.clone()].chunks(V::N));
            for ((s, v), sum) in parts.zip(&mut sums) {
                let x = z.load(s);
                *sum = r.mul_add(x, *sum);
                k.mul_add(z.load(v), w * x).store(s);
            }
        }
        let parts = out[columns.clone()]
            .chunks_mut(V::N)
            .zip(v[columns].chunks(V::N));
        for ((out, v), sum) in parts.zip(sums) {
            z.splat(bonus).mul_add(z.load(v), sum).store(out);
        }
    }
}

/// See [`crate::arch::Arch::rwkv7_step`].
#[inline(always)]
pub(in crate::arch) fn rwkv7_step<V: Lanes>(
    z: V,
    state: &mut [f32],
    [r, k, w, a, b]: [&[f32]; 5],
    v: &[f32],
    out: &mut [f32],
) {
    let n = r.len();
    assert!(
        state.len() == n * v.len()
            && [k, w, a, b].iter().all(|x| x.len() == n)
            && out.len() == v.len()
    );
    // The lanes of four rows are added up at once.
    for ((rows, v), out) in state
        .chunks_mut(SUMS * n)
        .zip(v.chunks(SUMS))
        .zip(out.chunks_mut(SUMS))
    {
        let mut sums = [z; SUMS];
        for c in (0..n).step_by(V::N) {
            let columns = c..n.min(c + V::N);
            let a = z.load(&a[columns.clone()]);
            for (row, sum) in rows.chunks_exact(n).zip(&mut sums) {
                *sum = z.load(&row[columns.clone()]).mul_add(a, *sum);
            }
        }
        let said = V::sum4(sums);
        let mut sums = [z; SUMS];
        for c in (0..n).step_by(V::N) {
            let columns = c..n.min(c + V::N);
            let (r, k) = (z.load(&r[columns.clone()]), z.load(&k[columns.clone()]));
            let (w, b) = (z.load(&w[columns.clone()]), z.load(&b[columns.clone()]));
            for (((row, sum), said), v) in rows.chunks_exact_mut(n).zip(&mut sums).zip(said).zip(v)
            {
                let s = &mut row[columns.clone()];
                let x = z
                    .splat(*v)
                    .mul_add(k, z.splat(said).mul_add(b, z.load(s) * w));
                x.store(s);
                *sum = x.mul_add(r, *sum);
            }
        }
        out.copy_from_slice(&V::sum4(sums)[..out.len()]);
    }
}

/// See [`crate::arch::Arch::causal_conv`].
#[inline(always)]
pub(in crate::arch) fn causal_conv<V: Lanes>(
    z: V,
    past: &mut [f32],
    (taps, stride): (&[f32], usize),
    x: &[f32],
    out: &mut [f32],
) {
    let (n, n_past) = (x.len(), past.len() / x.len());
    for c in (0..n).step_by(V::N) {
        let columns = c..n.min(c + V::N);
        let mut sum = z.load(&out[columns.clone()]);
        for tap in 0..n_past {
            let old = z.load(&past[tap * n..][columns.clone()]);
            sum = old.mul_add(z.load(&taps[tap * stride..][columns.clone()]), sum);
            if tap > 0 {
                old.store(&mut past[(tap - 1) * n..][columns.clone()]);
            }
        }
        let x = z.load(&x[columns.clone()]);
        if n_past > 0 {
            x.store(&mut past[(n_past - 1) * n..][columns.clone()]);
        }
        x.mul_add(z.load(&taps[n_past * stride..][columns.clone()]), sum)
            .store(&mut out[columns]);
    }
}
