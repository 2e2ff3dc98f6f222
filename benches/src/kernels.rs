//! Speed of every kernel of a level, compared with the machine's limits.

use crate::machine::{arithmetic_peak, read_bandwidth};
use half::f16;
use ruvllm::arch::{
    ActForm, Acts, Arch, AttnParams, AttnPartial, BlockP16, BlockQ16, CacheLine, ColumnsMut,
    KV_BLOCK, KV_SPAN, KvBlock, KvElement, KvSpan, PanelElement,
};
use ruvllm::quant::{DType, FORMATS};
use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

/// One kernel's speed on one thread.
#[derive(Clone, Debug)]
pub struct KernelRow {
    /// Name of the level.
    pub level: &'static str,
    /// Name of the kernel, and its operands.
    pub kernel: String,
    /// Seconds per call, the minimum of several.
    pub seconds: f64,
    /// Bytes that a call must read and write.
    pub bytes: u64,
    /// Operations per call.
    pub flops: u64,
    /// Lower bound of the time: seconds for the bytes at the memory bandwidth, or for the
    /// operations at the arithmetic peak, whichever is more.
    pub bound: f64,
}

impl KernelRow {
    /// Fraction of the bound's speed that the kernel reaches.
    pub fn share(&self) -> f64 {
        self.bound / self.seconds
    }
}

/// Values per row of weights.
const N: usize = 2048;
/// Bytes of weights that exceed any cache, and bytes that fit a core's own caches.
const FAR: usize = 256 << 20;
/// Values of an element-wise kernel.
const ELEMENTS: usize = 4096;
/// Measuring time per kernel.
const PATIENCE: Duration = Duration::from_millis(60);

/// Measures the kernels of `arch` on one thread, the caller's, and passes each result to `each`:
/// products with one row of activations, whose weights come from memory; products with 512 rows,
/// which arithmetic limits; attention over 4096 keys; and element-wise kernels, with data in the
/// cache.
///
/// # Errors
/// If the thread that measures the machine cannot be started.
pub fn kernels(arch: Arch, each: &mut dyn FnMut(KernelRow)) -> io::Result<()> {
    let mut noise = lines(512 * N * size_of::<f32>());
    let noise: &mut [f32] = bytemuck::cast_slice_mut(&mut noise);
    noise
        .iter_mut()
        .enumerate()
        .for_each(|(i, x)| *x = (i * 7919 % 2001) as f32 / 1000.0 - 1.0);
    // Every f16 among these bytes is between 0.04 and 2.
    let weights: Vec<u8> = (0..FAR as u32)
        .map(|i| 0x2a | (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x15)
        .collect();
    let mut y = lines(512 * N * size_of::<f32>());
    let y: &mut [f32] = bytemuck::cast_slice_mut(&mut y);
    let peak = |e| Ok((e, arithmetic_peak(arch, e, 1)?));
    let mut rows = Rows {
        arch,
        each,
        far: read_bandwidth(1)?,
        near: cache_bandwidth(arch),
        peaks: [
            PanelElement::F32,
            PanelElement::Bf16,
            PanelElement::I16,
            PanelElement::I8,
        ]
        .into_iter()
        .map(peak)
        .collect::<io::Result<_>>()?,
        noise,
    };
    rows.matvec(&weights);
    rows.gemm(&weights, y);
    rows.attention(y);
    rows.elementwise(&mut y[..ELEMENTS]);
    Ok(())
}

/// Rows of a level, and what they are compared with.
struct Rows<'r> {
    arch: Arch,
    each: &'r mut dyn FnMut(KernelRow),
    /// Bytes per second from memory and from the cache.
    far: f64,
    near: f64,
    /// Operations per second by element.
    peaks: Vec<(PanelElement, f64)>,
    /// Numbers between -1 and 1.
    noise: &'r [f32],
}

impl Rows<'_> {
    fn row(
        &mut self,
        kernel: String,
        bytes: usize,
        flops: usize,
        bandwidth: f64,
        peak: f64,
        f: &mut dyn FnMut(),
    ) {
        let seconds = fastest(f);
        let bound = (bytes as f64 / bandwidth).max(flops as f64 / peak);
        (self.each)(KernelRow {
            level: self.arch.name(),
            kernel,
            seconds,
            bytes: bytes as u64,
            flops: flops as u64,
            bound,
        });
    }

    fn peak_of(&self, element: PanelElement) -> f64 {
        let peaks = &mut self.peaks.iter();
        peaks
            .find(|(e, _)| *e == element)
            .map_or(f64::INFINITY, |(_, peak)| *peak)
    }

    /// Products with one row of activations.
    fn matvec(&mut self, weights: &[u8]) {
        let (arch, noise, far) = (self.arch, self.noise, self.far);
        for f in FORMATS {
            let row_bytes = N / f.block_elems * f.block_bytes;
            let n_rows = FAR / row_bytes;
            let blocks = quantised(arch, &noise[..N]);
            let mut planes = vec![bytemuck::Zeroable::zeroed(); BlockP16::per_row(N)];
            arch.quantize_p16(&noise[..N], &mut planes);
            let x = match arch.act_form(f.dtype) {
                ActForm::F32 => Acts::F32 {
                    x: &noise[..N],
                    n: N,
                },
                ActForm::Q16 => Acts::Q16 { x: &blocks, n: N },
                ActForm::P16 => Acts::P16 { x: &planes, n: N },
            };
            let mut out = vec![0.0; n_rows];
            let bytes = n_rows * row_bytes;
            self.row(
                format!("matvec {}", f.name),
                bytes,
                2 * n_rows * N,
                far,
                f32::INFINITY.into(),
                &mut || {
                    arch.matvec(
                        f.dtype,
                        &mut ColumnsMut::new(&mut out, 1, n_rows),
                        &weights[..bytes],
                        &x,
                    );
                },
            );
        }
    }

    /// Products with 512 rows; `y` is a buffer.
    fn gemm(&mut self, weights: &[u8], y: &mut [f32]) {
        let (arch, noise, near) = (self.arch, self.noise, self.near);
        for f in FORMATS {
            let (element, products) = arch.gemm_element(f.dtype);
            let peak = self.peak_of(element) / products as f64;
            let (m, n) = (512, 256);
            let w = &weights[..n * N / f.block_elems * f.block_bytes];
            let packed = packed(arch, f.dtype, noise, m);
            let packed: &[u8] = &bytemuck::cast_slice(&packed)[..arch.packed_len(f.dtype, m, N)];
            let mut workspace = lines(arch.gemm_workspace(f.dtype) * size_of::<CacheLine>());
            let bytes = w.len() + packed.len() + m * n * 4;
            self.row(
                format!("gemm {} {m} rows", f.name),
                bytes,
                2 * m * n * N,
                near,
                peak,
                &mut || {
                    arch.gemm(
                        f.dtype,
                        &mut ColumnsMut::new(&mut y[..m * n], m, n),
                        w,
                        packed,
                        N,
                        &mut workspace,
                    );
                },
            );
        }
    }

    /// Attention over 4096 keys; `y` is a buffer.
    fn attention(&mut self, y: &mut [f32]) {
        let (arch, noise, near) = (self.arch, self.noise, self.near);
        let f32_peak = self.peak_of(PanelElement::F32);
        let (head_dim, n_kv, group) = (128, 4096, 4);
        let p = AttnParams {
            head_dim,
            head_dim_v: head_dim,
            scale: 0.088,
            softcap: 0.0,
            slope: 0.0,
            exact: false,
        };
        let kv = &noise[..n_kv * head_dim];
        let kv_half: Vec<f16> = kv.iter().map(|&x| f16::from_f32(x)).collect();
        for (name, n_q) in [("one token", group), ("64 tokens", 64 * group)] {
            let ranges = vec![(0, n_kv as u32); n_q];
            let (q, flops) = (&noise[..n_q * head_dim], 4 * n_q * n_kv * head_dim);
            // A generated token's queries are not rounded.
            let p = AttnParams {
                exact: n_q == group,
                ..p
            };
            let out = &mut y[..n_q * head_dim];
            self.row(
                format!("attention f32, {name}"),
                8 * kv.len(),
                flops,
                near,
                f32_peak,
                &mut || {
                    attend(arch, out, q, kv, kv, &ranges, &p);
                },
            );
            let (element, products) = if n_q == group {
                (PanelElement::F32, 1)
            } else {
                arch.attention_element()
            };
            let peak = self.peak_of(element) / products as f64;
            self.row(
                format!("attention f16, {name}"),
                4 * kv.len(),
                flops,
                near,
                peak,
                &mut || {
                    attend(arch, out, q, &kv_half, &kv_half, &ranges, &p);
                },
            );
        }
    }

    /// Kernels of one value after the other, with data in the cache; `y` is a buffer.
    fn elementwise(&mut self, y: &mut [f32]) {
        let (arch, noise, near, n) = (self.arch, self.noise, self.near, y.len());
        let (x, w) = (&noise[..n], &noise[n..2 * n]);
        let mut half = vec![f16::ZERO; n];
        let mut blocks = quantised(arch, x);
        let mut planes = vec![bytemuck::Zeroable::zeroed(); BlockP16::per_row(n)];
        // Of angles: otherwise values that are rotated again and again shrink until they are slow to
        // compute with.
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            noise[..64].iter().map(|x| (x.cos(), x.sin())).unzip();
        let (cos, sin) = (&*cos, &*sin);
        let mut angles = vec![0.0; 128];
        let (cos_out, sin_out) = angles.split_at_mut(64);
        let mut near_row = |kernel: &str, bytes: usize, f: &mut dyn FnMut()| {
            self.row(format!("{kernel} {n}"), bytes, 0, near, f64::INFINITY, f);
        };
        near_row("dot", 8 * n, &mut || {
            black_box(arch.dot(x, w));
        });
        near_row("add", 12 * n, &mut || arch.add(y, x));
        near_row("add_scaled", 12 * n, &mut || arch.add_scaled(y, x, 0.5));
        near_row("rms_norm", 12 * n, &mut || arch.rms_norm(y, x, w, 1e-5));
        near_row("layer_norm", 16 * n, &mut || {
            arch.layer_norm(y, x, w, w, 1e-5)
        });
        near_row("softmax", 8 * n, &mut || arch.softmax(y));
        near_row("silu_mul", 12 * n, &mut || arch.silu_mul(y, x));
        near_row("gelu_mul", 12 * n, &mut || arch.gelu_mul(y, x));
        // Of the same values each time: applied over and over they would become subnormal.
        near_row("copy and gelu", 16 * n, &mut || {
            y.copy_from_slice(x);
            arch.gelu(y);
        });
        near_row("copy and gelu_erf", 16 * n, &mut || {
            y.copy_from_slice(x);
            arch.gelu_erf(y);
        });
        near_row("swiglu_oai", 12 * n, &mut || arch.swiglu_oai(y, x));
        near_row("sigmoid_mul", 12 * n, &mut || arch.sigmoid_mul(y, x));
        near_row("f32_to_f16", 6 * n, &mut || arch.f32_to_f16(x, &mut half));
        near_row("f16_to_f32", 6 * n, &mut || arch.f16_to_f32(&half, y));
        near_row("quantize_q16", 6 * n, &mut || {
            arch.quantize_q16(x, &mut blocks)
        });
        near_row("quantize_p16", 6 * n, &mut || {
            arch.quantize_p16(x, &mut planes)
        });
        near_row("rope_norm, 32 heads of 128,", 8 * n, &mut || {
            y.chunks_exact_mut(128)
                .for_each(|head| arch.rope_norm(head, cos, sin));
        });
        near_row("rope_neox, 32 heads of 128,", 8 * n, &mut || {
            y.chunks_exact_mut(128)
                .for_each(|head| arch.rope_neox(head, cos, sin));
        });
        near_row("rope_angles of 64 pairs for", 8 * 64, &mut || {
            arch.rope_angles(cos_out, sin_out, cos, 1000.0, 1.0)
        });
    }
}

/// Attention of query rows over contiguous keys `(n_kv, head_dim)` and values, span by span; `n_kv`
/// is a multiple of [`KV_BLOCK`].
pub fn attend<T: KvElement>(
    arch: Arch,
    out: &mut [f32],
    q: &[f32],
    k: &[T],
    v: &[T],
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    let (mut max, mut sum) = (vec![0.0; ranges.len()], vec![0.0; ranges.len()]);
    let mut total = AttnPartial {
        out,
        max: &mut max,
        sum: &mut sum,
    };
    total.clear();
    let spans = k
        .chunks(KV_SPAN * p.head_dim)
        .zip(v.chunks(KV_SPAN * p.head_dim_v));
    for (i, (k, v)) in spans.enumerate() {
        let mut blocks = [KvBlock::EMPTY; KV_SPAN / KV_BLOCK];
        let parts = k
            .chunks(KV_BLOCK * p.head_dim)
            .zip(v.chunks(KV_BLOCK * p.head_dim_v));
        let n = parts.len();
        blocks
            .iter_mut()
            .zip(parts)
            .for_each(|(block, (k, v))| *block = KvBlock { k, v });
        arch.attention(
            &mut total,
            q,
            KvSpan {
                first: i * KV_SPAN,
                blocks: &blocks[..n],
            },
            ranges,
            p,
        );
    }
    arch.attention_finish(&mut total, p);
}

fn quantised(arch: Arch, x: &[f32]) -> Vec<BlockQ16> {
    let mut blocks = vec![bytemuck::Zeroable::zeroed(); BlockQ16::per_row(x.len())];
    arch.quantize_q16(x, &mut blocks);
    blocks
}

/// Memory that begins at a cache line, as a session's does.
fn lines(bytes: usize) -> Vec<CacheLine> {
    vec![bytemuck::Zeroable::zeroed(); bytes.div_ceil(size_of::<CacheLine>())]
}

fn packed(arch: Arch, dtype: DType, x: &[f32], m: usize) -> Vec<CacheLine> {
    let (group, len) = (arch.pack_group(dtype), arch.packed_len(dtype, m, N));
    let mut packed = lines(len);
    let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut packed)[..len];
    for (x, packed) in x
        .chunks(group * N)
        .zip(bytes.chunks_mut(arch.packed_len(dtype, group, N)))
    {
        arch.pack(dtype, x, m, N, packed);
    }
    packed
}

/// Bytes per second that the level's simplest kernel reads from the L1 cache.
fn cache_bandwidth(arch: Arch) -> f64 {
    let x = vec![1.0f32; 2048];
    let bytes = 2 * size_of_val(&*x);
    bytes as f64
        / fastest(&mut || {
            black_box(arch.dot(black_box(&x), black_box(&x)));
        })
}

/// Minimum time of a call; calls are timed in batches of a tenth of a millisecond or more.
fn fastest(f: &mut dyn FnMut()) -> f64 {
    let mut calls = 1;
    let mut best = f64::INFINITY;
    let begin = Instant::now();
    let mut batches = 0;
    while batches < 5 || begin.elapsed() < PATIENCE {
        batches += 1;
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        let elapsed = start.elapsed().as_secs_f64();
        best = best.min(elapsed / calls as f64);
        if elapsed < 1e-4 {
            calls *= 2;
        }
    }
    best
}
