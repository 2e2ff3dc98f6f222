//! Kernels on slices, each declared once: formula, arguments, and checks of its safe method.
//!
//! A declaration becomes the entry of the levels' tables (`table.rs`), the method of
//! [`Arch`](super::Arch) (`methods/slices.rs`), and the instance of the shared source for each
//! vector level (`generic/mod.rs`). The source is a function of the same name and arguments in
//! `scalar/elementwise.rs` and one, after a first vector, in `generic/elementwise.rs` or
//! `generic/recurrence.rs`.
//!
//! In braces: `check` panics where its condition does not hold; `skip` comes first and returns
//! where its condition holds.

/// Calls `$do! { [$args] declarations }`.
macro_rules! for_each_slice_kernel {
    ($do:ident [$($args:tt)*]) => {
        $do! {
            [$($args)*]

            /// `Σ a·b`.
            fn dot(a: &[f32], b: &[f32]) -> f32 {
                check a.len() == b.len();
            }

            /// `y += x`.
            fn add(y: &mut [f32], x: &[f32]) {
                check y.len() == x.len();
            }

            /// `y += a·x`.
            fn add_scaled(y: &mut [f32], x: &[f32], a: f32) {
                check y.len() == x.len();
            }

            /// `y[i][c] += Σ_j t[i][j]·b[j·stride + c]`: a product of low rank, `t: (y.rows(),
            /// rank)` with columns of `B: (rank, stride)`; `b` begins at the first of them. Every
            /// sum goes in the order of `j`, whatever the other rows and columns.
            fn add_product(y: &mut $crate::arch::view::ColumnsMut<'_>, t: &[f32], b: &[f32], stride: usize) {
                skip t.is_empty() || y.cols() == 0;
                check t.len().is_multiple_of(y.rows());
                check has_rows(b.len(), stride, t.len() / y.rows(), y.cols());
            }

            /// [`Arch::add_product`] with the same bits, for columns stored in 16 bits.
            fn add_product_f16(y: &mut $crate::arch::view::ColumnsMut<'_>, t: &[f32], b: &[half::f16], stride: usize) {
                skip t.is_empty() || y.cols() == 0;
                check t.len().is_multiple_of(y.rows());
                check has_rows(b.len(), stride, t.len() / y.rows(), y.cols());
            }

            /// `y = x / sqrt(mean(x²) + eps) · w` (Zhang & Sennrich, arXiv 1910.07467).
            fn rms_norm(y: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
                check y.len() == x.len() && w.len() == x.len();
            }

            /// `y = (x − mean) / sqrt(var + eps) · w + b` (Ba et al., arXiv 1607.06450).
            fn layer_norm(y: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
                check y.len() == x.len() && w.len() == x.len() && b.len() == x.len();
            }

            /// Adds to `dx` the gradient with respect to the `x` of [`Arch::rms_norm`]; `dy` is
            /// that with respect to its `y`.
            fn rms_norm_backward(dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32) {
                check dx.len() == x.len() && dy.len() == x.len() && w.len() == x.len();
            }

            /// Adds to `dx` the gradient with respect to the `x` of [`Arch::layer_norm`]; `dy` is
            /// that with respect to its `y`.
            fn layer_norm_backward(dx: &mut [f32], dy: &[f32], x: &[f32], w: &[f32], eps: f32) {
                check dx.len() == x.len() && dy.len() == x.len() && w.len() == x.len();
            }

            /// Softmax in place.
            fn softmax(x: &mut [f32]) {}

            /// `cos[i] = factor·cos(pos·frequencies[i])`, and `sin` likewise: the angles of RoPE
            /// for the token at `pos`.
            fn rope_angles(cos: &mut [f32], sin: &mut [f32], frequencies: &[f32], pos: f32, factor: f32) {
                check cos.len() == frequencies.len() && sin.len() == frequencies.len();
            }

            /// Rotates adjacent pairs `(x[2i], x[2i+1])` of one head by `cos[i], sin[i]` (RoFormer,
            /// arXiv 2104.09864); `x.len() == 2·cos.len()`.
            fn rope_norm(x: &mut [f32], cos: &[f32], sin: &[f32]) {
                check Some(x.len()) == cos.len().checked_mul(2) && sin.len() == cos.len();
            }

            /// Rotates the pairs `(x[i], x[i + n/2])` of one head (GPT-NeoX order).
            fn rope_neox(x: &mut [f32], cos: &[f32], sin: &[f32]) {
                check Some(x.len()) == cos.len().checked_mul(2) && sin.len() == cos.len();
            }

            /// `gate = silu(gate)·up` (SwiGLU, arXiv 2002.05202).
            fn silu_mul(gate: &mut [f32], up: &[f32]) {
                check gate.len() == up.len();
            }

            /// `gate = gelu(gate)·up`, with the tanh approximation of GELU (arXiv 1606.08415).
            fn gelu_mul(gate: &mut [f32], up: &[f32]) {
                check gate.len() == up.len();
            }

            /// `x = gelu(x)`, tanh approximation.
            fn gelu(x: &mut [f32]) {}

            /// `gate = gelu(gate)·up`, by the error function.
            fn gelu_erf_mul(gate: &mut [f32], up: &[f32]) {
                check gate.len() == up.len();
            }

            /// `x = gelu(x) = x/2·(1 + erf(x/√2))`.
            fn gelu_erf(x: &mut [f32]) {}

            /// `gate = g·σ(1.702·g)·(u + 1)` with `g = min(gate, 7)` and `u` = `up` clamped to ±7
            /// (gpt-oss).
            fn swiglu_oai(gate: &mut [f32], up: &[f32]) {
                check gate.len() == up.len();
            }

            /// `gate = σ(gate)·x`.
            fn sigmoid_mul(gate: &mut [f32], x: &[f32]) {
                check gate.len() == x.len();
            }

            /// Replaces the operands of [`Arch::silu_mul`] by their gradients; `dy` is that of its
            /// result.
            fn silu_mul_backward(gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
                check gate.len() == up.len() && gate.len() == dy.len();
            }

            /// Replaces the operands of [`Arch::gelu_mul`] by their gradients; `dy` is that of its
            /// result.
            fn gelu_mul_backward(gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
                check gate.len() == up.len() && gate.len() == dy.len();
            }

            /// Replaces the operand of [`Arch::gelu`] by its gradient; `dy` is that of its result.
            fn gelu_backward(x: &mut [f32], dy: &[f32]) {
                check x.len() == dy.len();
            }

            /// Rounds to half precision, ties to even.
            fn f32_to_f16(x: &[f32], y: &mut [half::f16]) {
                check x.len() == y.len();
            }

            /// Widens half precision; exact.
            fn f16_to_f32(x: &[half::f16], y: &mut [f32]) {
                check x.len() == y.len();
            }

            /// A step of the gated delta rule (arXiv 2412.06464) for a head's `state`, `(k.len(),
            /// v.len())`: `S = rate·S; S = S + k·(β·(v − Sᵀ·k))ᵀ; out = Sᵀ·q`. There is one `rate`,
            /// or one per row of the state.
            fn delta_rule(
                state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], beta: f32, rate: &[f32],
                out: &mut [f32],
            ) {
                check q.len() == k.len() && out.len() == v.len();
                check Some(state.len()) == k.len().checked_mul(v.len());
                check rate.len() == 1 || rate.len() == k.len();
            }

            /// A step of a selective state space with one decay (Mamba 2, arXiv 2405.21060) for a
            /// head's `state`, `(b.len(), x.len())`: `S = decay·S + dt·b·xᵀ; out = cᵀ·S`.
            fn ssm_step(
                state: &mut [f32], b: &[f32], c: &[f32], decay: f32, dt: f32, x: &[f32],
                out: &mut [f32],
            ) {
                check b.len() == c.len() && out.len() == x.len();
                check Some(state.len()) == x.len().checked_mul(b.len()) && !state.is_empty();
            }

            /// A step of a selective state space model with a decay per state (Mamba 1, arXiv
            /// 2312.00752) for the channels of `x`, with `state` and `a` `(b.len(), x.len())`: `s =
            /// exp(dt·a)·s + dt·x·b; out = s·c`.
            fn ssm_step_by_state(
                state: &mut [f32], a: &[f32], b: &[f32], c: &[f32], dt: &[f32], x: &[f32],
                out: &mut [f32],
            ) {
                check b.len() == c.len() && out.len() == x.len() && dt.len() == x.len();
                check Some(state.len()) == x.len().checked_mul(b.len()) && !state.is_empty();
                check a.len() == state.len();
            }

            /// A step of RWKV 6 (arXiv 2404.05892) for a head's `state`, `(k.len(), v.len())`: `out
            /// = (S + (first·k)·vᵀ)ᵀ·r; S = diag(w)·S + k·vᵀ`.
            fn rwkv6_step(
                state: &mut [f32], r: &[f32], k: &[f32], v: &[f32], w: &[f32], first: &[f32],
                out: &mut [f32],
            ) {
                check [r, w, first].iter().all(|x| x.len() == k.len()) && out.len() == v.len();
                check Some(state.len()) == k.len().checked_mul(v.len());
            }

            /// A step of RWKV 7 (arXiv 2503.14456) for a head's `state`, `(v.len(), r.len())`, with
            /// `keys = [r, k, w, a, b]`: `S = S·diag(w) + (S·a)·bᵀ + v·kᵀ; out = S·r`.
            fn rwkv7_step(state: &mut [f32], keys: [&[f32]; 5], v: &[f32], out: &mut [f32]) {
                check keys.iter().all(|x| x.len() == keys[0].len()) && out.len() == v.len();
                check Some(state.len()) == keys[0].len().checked_mul(v.len()) && !keys[0].is_empty();
            }

            /// A step of a causal depthwise convolution: adds the products of taps and values to
            /// `out`; `past`, `(n, x.len())`, has the values of the tokens before, and `x` replaces
            /// the oldest. Rows of the `n + 1` taps are `taps.1` values apart.
            fn causal_conv(past: &mut [f32], taps: (&[f32], usize), x: &[f32], out: &mut [f32]) {
                check !x.is_empty() && past.len().is_multiple_of(x.len()) && out.len() == x.len();
                check has_rows(taps.0.len(), taps.1, past.len() / x.len() + 1, x.len());
            }
        }
    };
}
pub(super) use for_each_slice_kernel;
