//! Norms, rotations and element-wise kernels.

use crate::arch::Arch;
use crate::gpu::check::{Checker, Data, EPS, FAST, Lcg, close};
use crate::gpu::kernels::*;
use crate::layers::mamba2::softplus;
use crate::quant::DType;

pub(super) fn norm(gpu: &mut Checker<'_>) -> Result<(), String> {
    let (mut lcg, arch) = (Lcg(10), Arch::scalar());
    for (n, n_rows) in [(1, 1), (77, 3), (600, 2), (640, 3), (4640, 1)] {
        let (x, branch) = (lcg.values(n_rows * n), lcg.values(n_rows * n));
        let (w, b) = (lcg.values(n), lcg.values(n));
        let (eps, branch_scale) = (0.05, 0.25);
        let args = NormArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            eps,
        };
        let add = NormAddArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            eps,
            branch_scale,
        };
        let sum: Vec<f32> = x
            .iter()
            .zip(&branch)
            .map(|(x, b)| x + branch_scale * b)
            .collect();
        let rms = |x: &[f32]| {
            let mut y = vec![0.0; x.len()];
            y.chunks_exact_mut(n)
                .zip(x.chunks_exact(n))
                .for_each(|(y, x)| arch.rms_norm(y, x, &w, eps));
            y
        };
        let layer = |x: &[f32]| {
            let mut y = vec![0.0; x.len()];
            y.chunks_exact_mut(n)
                .zip(x.chunks_exact(n))
                .for_each(|(y, x)| arch.layer_norm(y, x, &w, &b, eps));
            y
        };
        // The sum's relative error is that of n positive terms on both sides; a normalised value is
        // at most √n, and the mean of a layer norm has the error of n terms below 1.5, over
        // the deviation.
        let of_sum = (2 * n) as f32 * EPS + FAST;
        let rms_tolerance = |_: usize| of_sum * (n as f32).sqrt();
        let deviation = |x: &[f32]| {
            let least = x.chunks_exact(n).map(|x| {
                let mean = x.iter().sum::<f32>() / n as f32;
                (x.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n as f32 + eps).sqrt()
            });
            least.fold(f32::INFINITY, f32::min)
        };
        let layer_tolerance =
            of_sum * ((n as f32).sqrt() + 4.0 / deviation(&x).min(deviation(&sum)));

        let call = [Data::F32(&x), Data::F32(&w), Data::Out];
        let y = gpu.call(&RMS_NORM, DType::F32, 0, &args, &call, &[])?;
        close(&format!("rms_norm {n}"), y.f32(0), &rms(&x), rms_tolerance)?;
        let call = [Data::F32(&x), Data::F32(&branch), Data::F32(&w), Data::Out];
        let y = gpu.call(&RMS_NORM_ADD, DType::F32, 0, &add, &call, &[])?;
        close("rms_norm_add: the sum", y.f32(0), &sum, |_| 2.0 * EPS)?;
        close(
            &format!("rms_norm_add {n}"),
            y.f32(1),
            &rms(&sum),
            rms_tolerance,
        )?;
        let call = [Data::F32(&x), Data::F32(&w), Data::F32(&b), Data::Out];
        let y = gpu.call(&LAYER_NORM, DType::F32, 0, &args, &call, &[])?;
        close(&format!("layer_norm {n}"), y.f32(0), &layer(&x), |_| {
            layer_tolerance
        })?;
        let call = [
            Data::F32(&x),
            Data::F32(&branch),
            Data::F32(&w),
            Data::F32(&b),
            Data::Out,
        ];
        let y = gpu.call(&LAYER_NORM_ADD, DType::F32, 0, &add, &call, &[])?;
        close("layer_norm_add: the sum", y.f32(0), &sum, |_| 2.0 * EPS)?;
        close(
            &format!("layer_norm_add {n}"),
            y.f32(1),
            &layer(&sum),
            |_| layer_tolerance,
        )?;
    }
    norm_of_heads(gpu, &mut lcg)
}

/// Rows that do not fill the last threadgroup.
fn norm_of_heads(gpu: &mut Checker<'_>, lcg: &mut Lcg) -> Result<(), String> {
    let arch = Arch::scalar();
    for (n, n_rows) in [(64, 4), (80, 7), (200, 1)] {
        let (x, w) = (lcg.values(n_rows * n), lcg.values(n));
        let args = NormArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            eps: 1e-6,
        };
        let y = gpu.call(
            &RMS_NORM_HEADS,
            DType::F32,
            0,
            &args,
            &[Data::F32(&x), Data::F32(&w)],
            &[],
        )?;
        let mut e = vec![0.0; x.len()];
        e.chunks_exact_mut(n)
            .zip(x.chunks_exact(n))
            .for_each(|(y, x)| arch.rms_norm(y, x, &w, 1e-6));
        let tolerance = ((2 * n) as f32 * EPS + FAST) * (n as f32).sqrt();
        close(&format!("rms_norm_heads {n}"), y.f32(0), &e, |_| tolerance)?;
    }
    Ok(())
}

pub(super) fn rope(gpu: &mut Checker<'_>) -> Result<(), String> {
    let (mut lcg, arch) = (Lcg(11), Arch::scalar());
    let sizes = [
        (1, 1, 2, 0, 2),
        (3, 5, 64, 0, 64),
        (2, 3, 80, 0, 32),
        (2, 3, 80, 48, 32),
    ];
    for (n_rows, n_head, head_dim, first, n_dims) in sizes {
        let x = lcg.values(n_rows * n_head * head_dim);
        let frequencies: Vec<f32> = (0..n_dims / 2).map(|i| 0.7f32.powi(i as i32)).collect();
        let mut angles = Vec::new();
        let (mut norm, mut neox) = (x.clone(), x.clone());
        for row in 0..n_rows {
            let (mut cos, mut sin) = (vec![0.0; n_dims / 2], vec![0.0; n_dims / 2]);
            arch.rope_angles(
                &mut cos,
                &mut sin,
                &frequencies,
                (17 * row + 3) as f32,
                1.25,
            );
            angles.extend(cos.iter().zip(&sin).flat_map(|(c, s)| [*c, *s]));
            for head in row * n_head..(row + 1) * n_head {
                let rotated = head * head_dim + first..head * head_dim + first + n_dims;
                arch.rope_norm(&mut norm[rotated.clone()], &cos, &sin);
                arch.rope_neox(&mut neox[rotated], &cos, &sin);
            }
        }
        let args = RopeArgs {
            n_rows: n_rows as u32,
            n_head: n_head as u32,
            head_dim: head_dim as u32,
            first: first as u32,
            n_dims: n_dims as u32,
        };
        for (kernel, expected) in [(&ROPE_NORM, &norm), (&ROPE_NEOX, &neox)] {
            let y = gpu.call(
                kernel,
                DType::F32,
                0,
                &args,
                &[Data::F32(&x), Data::F32(&angles)],
                &[],
            )?;
            // Two products below 1.25 and their sum.
            close(kernel.name, y.f32(0), expected, |_| 4.0 * 1.25 * EPS)?;
        }
    }
    Ok(())
}

pub(super) fn elementwise(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(12);
    for n in [1, 300] {
        // Includes values at the limits of the exponential's range.
        let gate: Vec<f32> = (0..n)
            .map(|i| lcg.signed() * if i % 5 == 0 { 200.0 } else { 6.0 })
            .collect();
        let up = lcg.values(n);
        activations(gpu, &gate, &up)?;
        sums_and_logits(gpu, &gate, &up)?;
        rows(gpu, &mut lcg, &up)?;
    }
    heads(gpu, &mut lcg)
}

fn activations(gpu: &mut Checker<'_>, gate: &[f32], up: &[f32]) -> Result<(), String> {
    let (arch, n) = (Arch::scalar(), gate.len());
    let args = ElementwiseArgs { n: n as u32 };
    // A sigmoid's exponent has an error of a few units of its own size, which is at most 40
    // where the result is not yet 0; gelu's exponent is a product of three factors.
    let tolerance = |i: usize| 8.0 * FAST * gate[i].abs().min(40.0) + 1e-30;
    for (kernel, f) in [
        (&SILU_MUL, Arch::silu_mul as fn(Arch, &mut [f32], &[f32])),
        (&GELU_MUL, Arch::gelu_mul),
    ] {
        let y = gpu.call(
            kernel,
            DType::F32,
            0,
            &args,
            &[Data::F32(gate), Data::F32(up)],
            &[],
        )?;
        let mut e = gate.to_vec();
        f(arch, &mut e, up);
        close(kernel.name, y.f32(0), &e, tolerance)?;
    }
    // Beyond the bounds on both sides; the factor that they leave is at most 8.
    let wide: Vec<f32> = up.iter().map(|u| 12.0 * u).collect();
    let y = gpu.call(
        &SWIGLU_OAI,
        DType::F32,
        0,
        &args,
        &[Data::F32(gate), Data::F32(&wide)],
        &[],
    )?;
    let oai = |g: f32, u: f32| g / (1.0 + (-1.702 * g).exp()) * (u.clamp(-7.0, 7.0) + 1.0);
    let e: Vec<f32> = gate
        .iter()
        .zip(&wide)
        .map(|(g, u)| oai(g.min(7.0), *u))
        .collect();
    close("swiglu_oai", y.f32(0), &e, |i| 8.0 * tolerance(i))?;

    let y = gpu.call(&GELU, DType::F32, 0, &args, &[Data::F32(gate)], &[])?;
    let mut e = gate.to_vec();
    arch.gelu(&mut e);
    close("gelu", y.f32(0), &e, tolerance)?;

    let y = gpu.call(&SQUARED_RELU, DType::F32, 0, &args, &[Data::F32(gate)], &[])?;
    let e: Vec<f32> = gate.iter().map(|x| x * x.max(0.0)).collect();
    close("squared_relu", y.f32(0), &e, |_| 0.0)?;
    unary(gpu, gate, tolerance)?;
    gated(gpu, gate, &wide, tolerance)
}

/// Functions of one value.
fn unary(gpu: &mut Checker<'_>, x: &[f32], tolerance: impl Fn(usize) -> f32) -> Result<(), String> {
    let mut by_erf = x.to_vec();
    Arch::scalar().gelu_erf(&mut by_erf);
    let with = |f: fn(f32) -> f32| -> Vec<f32> { x.iter().map(|&x| f(x)).collect() };
    let xielu = |x: f32| {
        let curve = match x > 0.0 {
            true => 0.7 * x * x,
            false => (x.min(-0.5).exp_m1() - x) * 0.4,
        };
        curve + 0.5 * x
    };
    for (function, [a, b, c, d], expected) in [
        (
            UnaryFunction::Scale,
            [0.3, 0.0, 0.0, 0.0],
            with(|x| 0.3 * x),
        ),
        (
            UnaryFunction::Clamp,
            [-1.0, 2.0, 0.0, 0.0],
            with(|x| x.clamp(-1.0, 2.0)),
        ),
        (
            UnaryFunction::Clamp,
            [0.0, f32::MAX, 0.0, 0.0],
            with(|x| x.max(0.0)),
        ),
        (UnaryFunction::GeluErf, [0.0; 4], by_erf),
        (UnaryFunction::Xielu, [0.7, 0.4, 0.5, -0.5], with(xielu)),
        (UnaryFunction::Softplus, [0.0; 4], with(softplus)),
    ] {
        let args = FunctionArgs {
            n: x.len() as u32,
            function: function as u32,
            a,
            b,
            c,
            d,
        };
        let y = gpu.call(&UNARY, DType::F32, 0, &args, &[Data::F32(x)], &[])?;
        let tolerance = |i: usize| tolerance(i) + 4.0 * EPS * expected[i].abs() + EPS;
        close(
            &format!("unary, {function:?}"),
            y.f32(0),
            &expected,
            tolerance,
        )?;
    }
    Ok(())
}

/// Functions of a gate, whose factors are below 12.
fn gated(
    gpu: &mut Checker<'_>,
    gate: &[f32],
    up: &[f32],
    tolerance: impl Fn(usize) -> f32,
) -> Result<(), String> {
    let mut by_erf = gate.to_vec();
    Arch::scalar().gelu_erf_mul(&mut by_erf, up);
    let silu = |g: f32| g / (1.0 + (-g).exp());
    let with = |f: &dyn Fn(f32, f32) -> f32| -> Vec<f32> {
        gate.iter().zip(up).map(|(&g, &u)| f(g, u)).collect()
    };
    let situ = |g: f32| 2.0 * (g / 2.0).tanh() / (1.0 + (-g).exp());
    for (function, [a, b], expected) in [
        (
            GatedFunction::Relu,
            [0.0, 0.0],
            with(&|g, u| g.max(0.0) * u),
        ),
        (GatedFunction::GeluErf, [0.0, 0.0], by_erf),
        (
            GatedFunction::SiluClamped,
            [2.5, 0.0],
            with(&|g, u| silu(g.min(2.5)) * u.clamp(-2.5, 2.5)),
        ),
        (
            GatedFunction::SiluClampedAfter,
            [2.5, 0.0],
            with(&|g, u| silu(g).min(2.5) * u.clamp(-2.5, 2.5)),
        ),
        (GatedFunction::Situ, [2.0, 0.0], with(&|g, u| situ(g) * u)),
        (
            GatedFunction::Situ,
            [2.0, 3.0],
            with(&|g, u| situ(g) * 3.0 * (u / 3.0).tanh()),
        ),
    ] {
        let args = FunctionArgs {
            n: gate.len() as u32,
            function: function as u32,
            a,
            b,
            ..FunctionArgs::default()
        };
        let data = [Data::F32(gate), Data::F32(up)];
        let y = gpu.call(&GATED, DType::F32, 0, &args, &data, &[])?;
        let tolerance = |i: usize| 12.0 * tolerance(i) + 4.0 * EPS * expected[i].abs();
        close(
            &format!("gated, {function:?}"),
            y.f32(0),
            &expected,
            tolerance,
        )?;
    }
    Ok(())
}

fn sums_and_logits(gpu: &mut Checker<'_>, gate: &[f32], up: &[f32]) -> Result<(), String> {
    let n = gate.len();
    let args = AddScaledArgs {
        n: n as u32,
        scale: 0.3,
    };
    let y = gpu.call(
        &ADD_SCALED,
        DType::F32,
        0,
        &args,
        &[Data::F32(up), Data::F32(gate)],
        &[],
    )?;
    let e: Vec<f32> = up.iter().zip(gate).map(|(y, x)| y + 0.3 * x).collect();
    close("add_scaled", y.f32(0), &e, |i| {
        2.0 * EPS * (up[i].abs() + gate[i].abs())
    })?;

    for (scale, softcap) in [(0.5, 0.0), (2.0, 30.0)] {
        let args = FinishLogitsArgs {
            n: n as u32,
            scale,
            softcap,
        };
        let y = gpu.call(
            &FINISH_LOGITS,
            DType::F32,
            0,
            &args,
            &[Data::F32(gate)],
            &[],
        )?;
        let cap = |x: f32| {
            if softcap == 0.0 {
                scale * x
            } else {
                softcap * (scale * x / softcap).tanh()
            }
        };
        let e: Vec<f32> = gate.iter().map(|x| cap(*x)).collect();
        close("finish_logits", y.f32(0), &e, |i| FAST * e[i].abs())?;
    }
    Ok(())
}

/// A bias, or a row times its own gate, added to each of several rows.
fn rows(gpu: &mut Checker<'_>, lcg: &mut Lcg, up: &[f32]) -> Result<(), String> {
    let (n, n_rows) = (up.len(), 3);
    let (y, x) = (lcg.values(n_rows * n), lcg.values(n_rows * n));
    let args = AddBiasArgs {
        n: n as u32,
        n_rows: n_rows as u32,
    };
    let result = gpu.call(
        &ADD_BIAS,
        DType::F32,
        0,
        &args,
        &[Data::F32(&y), Data::F32(up)],
        &[],
    )?;
    let e: Vec<f32> = y.iter().enumerate().map(|(i, y)| y + up[i % n]).collect();
    close("add_bias", result.f32(0), &e, |_| 0.0)?;

    let strength = [-3.0, 0.1, 90.0];
    let args = AddGatedArgs {
        n: n as u32,
        n_rows: n_rows as u32,
    };
    let data = [Data::F32(&y), Data::F32(&x), Data::F32(&strength)];
    let result = gpu.call(&ADD_GATED, DType::F32, 0, &args, &data, &[])?;
    let e: Vec<f32> = (0..n_rows * n)
        .map(|i| y[i] + x[i] / (1.0 + (-strength[i / n]).exp()))
        .collect();
    close("add_gated", result.f32(0), &e, |_| 2.0 * FAST)?;
    Ok(())
}

/// Gates of values, of heads and of rows, and parts of heads that are copied.
fn heads(gpu: &mut Checker<'_>, lcg: &mut Lcg) -> Result<(), String> {
    let (n_rows, n_head, n) = (3, 5, 72);
    let x = lcg.values(n_rows * n_head * n);
    let gates: Vec<f32> = lcg.values(x.len()).iter().map(|x| 30.0 * x).collect();
    let functions = [
        (
            GateFunction::Sigmoid,
            (|g| 1.0 / (1.0 + (-g).exp())) as fn(f32) -> f32,
        ),
        (GateFunction::Softplus, |g| g.exp().ln_1p()),
        (GateFunction::Identity, |g| g),
    ];
    for [gate_value, gate_head, gate_row] in [[1, n, n_head * n], [0, 1, n_head], [0, 0, 1]] {
        let n_gates = (n_rows - 1) * gate_row + (n_head - 1) * gate_head + (n - 1) * gate_value + 1;
        for (function, f) in functions {
            let args = GateHeadsArgs {
                n: n as u32,
                n_head: n_head as u32,
                n_rows: n_rows as u32,
                gate_value: gate_value as u32,
                gate_head: gate_head as u32,
                gate_row: gate_row as u32,
                function: function as u32,
            };
            let data = [Data::F32(&x), Data::F32(&gates[..n_gates])];
            let y = gpu.call(&GATE_HEADS, DType::F32, 0, &args, &data, &[])?;
            let gate = |i: usize| {
                let (row, head, value) = (i / (n_head * n), i / n % n_head, i % n);
                gates[row * gate_row + head * gate_head + value * gate_value]
            };
            let e: Vec<f32> = (0..x.len()).map(|i| x[i] * f(gate(i))).collect();
            // An exponent errs by a few units of its own size; so does a logarithm of up to 2.
            let tolerance = |i: usize| 8.0 * FAST * gate(i).abs().max(1.0);
            close(
                &format!("gate_heads, {function:?}"),
                y.f32(0),
                &e,
                tolerance,
            )?;
        }
    }

    // The last 40 of 72 values of each head to the first of heads of 44, and one head to all.
    for (n_head, x_head) in [(5, 72), (3, 0)] {
        let (n, y_head) = (40, 44);
        let (x_row, y_row) = (5 * 72, n_head * y_head + 1);
        let from = &x[..2 * x_row + (n_head - 1) * x_head + n];
        let to = lcg.values(2 * y_row + (n_head - 1) * y_head + n);
        let args = CopyHeadsArgs {
            n: n as u32,
            n_head: n_head as u32,
            n_rows: 3,
            x_head: x_head as u32,
            x_row: x_row as u32,
            y_head: y_head as u32,
            y_row: y_row as u32,
        };
        let data = [Data::F32(from), Data::F32(&to)];
        let y = gpu.call(&COPY_HEADS, DType::F32, 0, &args, &data, &[])?;
        let mut e = to.clone();
        for (row, head) in (0..3).flat_map(|row| (0..n_head).map(move |head| (row, head))) {
            let source = &from[row * x_row + head * x_head..][..n];
            e[row * y_row + head * y_head..][..n].copy_from_slice(source);
        }
        close("copy_heads", y.f32(0), &e, |_| 0.0)?;
    }
    Ok(())
}
